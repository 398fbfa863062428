"""The stores of a running server: rows in SQLite, blobs in a folder or a bucket."""
