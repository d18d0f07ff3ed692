"""One module for each system whose users call our operators by its own names. None imports its system."""
