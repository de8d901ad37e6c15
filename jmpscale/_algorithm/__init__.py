"""The algorithm of loss scaling, which neither raises nor warns: its guards do."""
