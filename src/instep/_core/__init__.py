"""What every source shares. Imports torch alone; never ``torch.distributed``."""
