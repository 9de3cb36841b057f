"""Objects in buckets and on web servers, by obstore."""
