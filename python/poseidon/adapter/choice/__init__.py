"""The choice by time: which scheme each layer takes, from what steps are measured to cost (docs/choice.md)."""
