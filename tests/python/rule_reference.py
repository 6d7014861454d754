"""Update rules as textbooks write them, for the tests of what servers do with them."""

from __future__ import annotations

from typing import Any

import numpy as np

RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "weight_decay": 0.01},
    "sgd momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "sgd nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1},
    "adamw": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1},
    "lamb": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1},
}


class Reference:
    """The rules as textbooks write them, on float64 arrays."""

    def __init__(self, name: str, parameters: np.ndarray) -> None:
        self.kind = name.partition(" ")[0]
        self.rule = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, **RULES[name]}
        self.parameters = parameters.copy()
        self.first = np.zeros_like(parameters)
        self.second = np.zeros_like(parameters)
        self.count = 0

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.count += 1
        if self.rule.get("maximize"):
            gradient = -gradient
        return self._sgd(gradient) if self.kind == "sgd" else self._moments(gradient)

    def _sgd(self, gradient: np.ndarray) -> np.ndarray:
        rule = self.rule
        gradient = gradient + rule["weight_decay"] * self.parameters
        share = 1 if self.count == 1 else 1 - rule["dampening"]
        self.first = rule["momentum"] * self.first + share * gradient
        direction = gradient + rule["momentum"] * self.first if rule["nesterov"] else self.first
        self.parameters -= rule["lr"] * direction
        return self.parameters

    def _moments(self, gradient: np.ndarray) -> np.ndarray:
        rule, decay = self.rule, self.rule["weight_decay"] * self.parameters
        if self.kind == "adam":
            gradient = gradient + decay
        self.first = rule["beta1"] * self.first + (1 - rule["beta1"]) * gradient
        self.second = rule["beta2"] * self.second + (1 - rule["beta2"]) * gradient**2
        unbiased = self.second / (1 - rule["beta2"] ** self.count)
        direction = self.first / (1 - rule["beta1"] ** self.count) / (np.sqrt(unbiased) + rule["eps"])
        if self.kind == "adam":
            self.parameters -= rule["lr"] * direction
        elif self.kind == "adamw":
            self.parameters -= rule["lr"] * (direction + decay)
        else:
            direction = direction + decay
            ratio = np.linalg.norm(self.parameters) / np.linalg.norm(direction)
            self.parameters -= rule["lr"] * ratio * direction
        return self.parameters
