"""Wrong and other right answers to the exercises of lesson 10."""

_PUSH = """        whole = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        if whole.endswith("\\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = whole[len(self.text) :]
        self.text = whole
"""

MUTANTS = [
    (
        "U1",
        "10.1",
        _PUSH,
        "        piece = self.tokenizer.decode([token_id], skip_special_tokens=True)\n        self.text += piece\n",
    ),
    ("U1", "10.1", 'if whole.endswith("\\N{REPLACEMENT CHARACTER}"):', "if False:"),
    ("U1", "10.1", 'if whole.endswith("\\N{REPLACEMENT CHARACTER}"):', 'if whole == "\\N{REPLACEMENT CHARACTER}":'),
    (
        "U4",
        "10.1",
        _PUSH,
        """        piece = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        if piece.endswith("\\N{REPLACEMENT CHARACTER}"):
            return ""
        self.token_ids = []
""",
    ),
    ("U4", "10.1", "piece = whole[len(self.text) :]", "piece = whole[len(self.text) :].strip()"),
    ("U2", "10.1", "return rest", 'return ""'),
    ("U2", "10.1", "return rest", 'return rest.replace("\\N{REPLACEMENT CHARACTER}", "")'),
    ("U2", "10.1", 'if whole.endswith("\\N{REPLACEMENT CHARACTER}"):', 'if "\\N{REPLACEMENT CHARACTER}" in whole:'),
    (None, "10.1", "        self.text = everything\n", ""),
    ("T1", "10.2", "if temperature == 0:", "if temperature < 0:"),
    ("T1", "10.2", "return int(logits.argmax())", "temperature = 1"),
    ("T2", "10.2", "logits / temperature", "logits * temperature"),
    ("T2", "10.2", "logits / temperature", "logits"),
    (
        "T2",
        "10.2",
        "before = ranked.cumsum(dim=-1) - ranked",
        "plain = logits.softmax(dim=-1).sort(descending=True)[0]\n    before = plain.cumsum(dim=-1) - plain",
    ),
    ("T3", "10.2", "before = ranked.cumsum(dim=-1) - ranked", "before = ranked.cumsum(dim=-1)"),
    ("T3", "10.2", "ranked[before >= top_p] = 0", "ranked[before >= 1] = 0"),
    ("T3", "10.2", "ranked[before >= top_p] = 0", "ranked[ranked < 1 - top_p] = 0"),
    ("T5", "10.2", "return int(ids[place])", "return int(place)"),
    ("T7", "10.2", "seed * 1_000_003 + num_generated", "seed"),
    ("T7", "10.2", "seed * 1_000_003 + num_generated", "seed * num_generated"),
    (None, "10.2", "seed * 1_000_003 + num_generated", "seed + num_generated"),
    (None, "10.2", "return int(ids[place])", "return float(ids[place]) + 0.5"),
    ("I5", "10.3", "for name in step.tokens:", "for name in {chunk.request for chunk in step.chunks}:"),
    (
        "A9",
        "10.3",
        "for name, moments in times.items():",
        "for name, moments in times.items():\n        moments = sorted({t for row in times.values() for t in row})",
    ),
]

COSTS = []

ALSO_RIGHT = {
    "10.1": [
        '''
class TextStream:
    """Only the newest tokens are decoded again, behind one that was shown already."""

    def __init__(self, tokenizer, stop=()):
        self.tokenizer, self.stop, self.text, self.stopped = tokenizer, stop, "", False
        self.before, self.new = [], []

    def decoded(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def push(self, token_id, last=False):
        if token_id is not None:
            self.new.append(token_id)
        known, both = self.decoded(self.before), self.decoded(self.before + self.new)
        if both.endswith(chr(0xFFFD)) and not last:
            return ""
        piece = both[len(known):]
        if piece:
            self.before, self.new = self.new, []
        self.text += piece
        return piece

    def flush(self):
        return self.push(None, last=True)
''',
        '''
class TextStream:
    """A generator inside, and a tuple of tokens; whole characters are shown even when a broken one follows."""

    def __init__(self, tokenizer, stop=()):
        self.decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
        self.ids, self.count, self.stopped = (), 0, False

    @property
    def text(self):
        return self.decode(self.ids)[: self.count]

    def push(self, token_id):
        self.ids += (token_id,)
        return self.show(self.decode(self.ids).rstrip(chr(0xFFFD)))

    def show(self, text):
        old, self.count = self.count, max(self.count, len(text))
        return text[old:]

    def flush(self):
        return self.show(self.decode(self.ids))
''',
    ],
    "10.2": [
        """
import random

def sample_token(logits, temperature, top_p, seed, num_generated):
    values = logits.tolist()
    best = max(values)
    if not temperature:
        return values.index(best)
    weights = [(math.exp((value - best) / temperature), i) for i, value in enumerate(values)]
    total = sum(w for w, _ in weights)
    kept, mass = [], 0.0
    for weight, i in sorted(weights, reverse=True):
        if mass >= top_p * total:
            break
        kept.append((weight, i))
        mass += weight
    return random.Random(f"{seed}:{num_generated}").choices([i for _, i in kept], [w for w, _ in kept])[0]
""".replace("import random", "import math\nimport random"),
        """
import numpy as np

def sample_token(logits, temperature, top_p, seed, num_generated):
    x = logits.double().numpy()
    if temperature == 0:
        return np.argmax(x)
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    keep = order[: np.searchsorted(np.cumsum(p[order]), top_p) + 1]
    return np.random.default_rng([seed, num_generated]).choice(keep, p=p[keep] / p[keep].sum())
""",
    ],
    "10.3": [
        """
def latencies(trace, percent):
    answer = {}
    for name, times in trace.token_times().items():
        gaps = [times[i + 1] - times[i] for i in range(len(times) - 1)]
        first = times[0] - trace.requests[name].arrival_time if times else None
        answer[name] = [first, percentile(gaps, percent), max(gaps)] if gaps else [first, None, None]
    return answer
""",
        """
import numpy as np

def latencies(trace, percent):
    result = {}
    for name, request in trace.requests.items():
        times = np.array([request.arrival_time] + [step.end for step in trace.steps if name in step.tokens])
        waits = np.diff(times)
        gaps = waits[1:]
        result[name] = (
            waits[0] if len(waits) else None,
            np.percentile(gaps, percent) if len(gaps) else None,
            gaps.max() if len(gaps) else None,
        )
    return result
""",
    ],
}
