"""What training steps and predictions cost, beside plain PyTorch and other libraries: the work of ``bbb bench``."""
