"""The subcommands of ``fastconv``, a module each: from parsed arguments to exit status."""
