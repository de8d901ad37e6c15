"""The algorithm of loss scaling. Its text neither raises nor warns: its guards do."""
