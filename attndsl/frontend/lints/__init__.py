"""Warnings about correct programs that hardly mean what they say."""
