"""Run the epochs of a rank from the plan to finished batches, and exchange messages with the trainer."""
