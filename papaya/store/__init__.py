"""The stores of production: rows in SQLite, blobs in a folder. They know no protocol rule."""
