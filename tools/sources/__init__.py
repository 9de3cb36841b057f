"""What is to be packed: folders of classes, tables, files by ID; listed, and checked file by file."""
