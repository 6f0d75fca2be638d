"""Everything about cutting a batch into pieces that needs no framework."""
