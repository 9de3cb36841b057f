"""Ranges on their way: tried again, continued, watched for stragglers, as many at once as pays."""
