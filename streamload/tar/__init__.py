"""What is in an archive: headers, grouping into samples, scanning, decompression."""
