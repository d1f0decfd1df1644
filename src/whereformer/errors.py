class InputError(ValueError):
    """What was asked cannot be: the message names the argument, its value and what is accepted."""
