"""multiback: many losses, one forward pass, and what each way to back-propagate them costs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
