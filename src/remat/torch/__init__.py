"""PyTorch."""
from remat.torch.trace import trace
from remat.torch.measure import measure
__all__=["trace","measure"]
