"""Replicas of stages: micro-batch i of a stage runs on replica i mod r."""
