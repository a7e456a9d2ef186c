"""Which experts each token wants: skewed towards favourites, with a memory of the token before.

Comes in: a seed and the model's shape. Goes out, per position: for every layer the chosen experts in rank order with
their weights. The sequence depends on the seed and the text alone, never on the cache or on timing, so that runs
which differ only in how weights are fetched route the same and read comparably.
"""

import random

Routing = list[tuple[int, float]]  # (expert, weight), best first


class Router:
    """The routing of one generation."""

    def __init__(self, seed: str, layers: list[int], n_expert: int, n_used: int) -> None:
        self._rng = random.Random(seed)
        self._layers = layers
        self._n_expert = n_expert
        self._n_used = min(n_used, n_expert)
        self._last: dict[int, list[int]] = {}

    def token(self) -> dict[int, Routing]:
        """Route the next position through every layer."""
        return {layer: self._route(layer) for layer in self._layers}

    def _route(self, layer: int) -> Routing:
        rng = self._rng
        # Two of five stay from the token before: measured traces have that much reuse, and caches live on it.
        chosen = [e for e in self._last.get(layer, ()) if rng.random() < 0.4]
        while len(chosen) < self._n_used:
            # squaring skews towards low numbers; the layer turns the wheel so that favourites differ
            expert = (int(self._n_expert * rng.random() ** 2) + 7 * layer) % self._n_expert
            if expert not in chosen:
                chosen.append(expert)
        rng.shuffle(chosen)
        self._last[layer] = chosen
        raw = sorted((0.2 + rng.random() for _ in chosen), reverse=True)
        total = sum(raw)
        return [(expert, weight / total) for expert, weight in zip(chosen, raw, strict=True)]

    def blur(self, routing: Routing, agreement: float, rng: random.Random) -> Routing:
        """A prediction of a routing that agrees with it on about that fraction of slots."""
        out: Routing = []
        taken = {expert for expert, _ in routing}
        for expert, weight in routing:
            if rng.random() >= agreement and len(taken) < self._n_expert:
                expert = rng.choice([e for e in range(self._n_expert) if e not in taken])
                taken.add(expert)
            out.append((expert, weight))
        return out
