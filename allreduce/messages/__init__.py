"""All that communicates below a backend."""
