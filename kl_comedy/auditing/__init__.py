"""Which gradient a loss, a trainer or a library has: imports theory and lab; its core needs torch and numpy alone."""
