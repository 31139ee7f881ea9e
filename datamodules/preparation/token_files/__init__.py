"""Files of tokens that other programs wrote: one module a format, each gives its documents."""
