"""``torch.compile`` within a budget: the joint graph of AOTAutograd planned and parted for Inductor."""
