"""Problems whose answers can be checked, and what checks them: imports no other room."""
