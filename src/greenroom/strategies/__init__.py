"""The strategies: what moves when. Only this room changes a module."""
