"""What the commands print: tables, progress, logs, summaries."""
