"""List the sources of `shardify`: ImageFolders, tables, files by ID; checked file by file."""
