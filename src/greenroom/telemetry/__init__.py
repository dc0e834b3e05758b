"""Looking at a forward: traces and plots."""
