"""How a parameter's gradient follows from what its layer saved and the gradient that reaches it; a file per family."""
