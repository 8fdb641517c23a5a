"""Data: depth (`data.depth`), synthetic scenes, fields and tables; each part is imported on its own."""
