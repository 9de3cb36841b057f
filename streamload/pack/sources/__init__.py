"""What `shardify` packs: ImageFolders, tables, files by ID; listed, and checked file by file."""
