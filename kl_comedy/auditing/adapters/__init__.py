"""The settings of other libraries as losses, one module each: imports auditing.adapter and the library."""
