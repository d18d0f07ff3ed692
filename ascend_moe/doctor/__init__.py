"""`ascend-moe doctor`: checks of this machine, as findings with a reason and a fix."""
