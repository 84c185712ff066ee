"""Wrong and other right answers to the exercises of lesson 01."""

MUTANTS = [
    ("M4", "01.1", "model(text, 0)", "model(text[-1:], len(text) - 1)"),  # right for a prompt of one token only
    ("M4", "01.1", "model(text, 0)", "model(prompt, 0)"),  # asks about the prompt again and again
    ("P1", "01.1", "model(text, 0)", "model(text, len(text) - len(prompt) + 1)"),
    ("K2", "01.2", "model(answer[-1:], position, cache)", "model([*prompt, *answer], 0, cache)"),
    ("K2", "01.2", "model(answer[-1:], position, cache)", "model([*prompt, *answer], len(prompt), cache)"),
    ("K2", "01.2", "model(answer[-1:], position, cache)", "model(answer, len(prompt), cache)"),
    ("P1", "01.2", "model(answer[-1:], position, cache)", "model(answer[-1:], 0, cache)"),
    ("P1", "01.2", "position = len(prompt) + len(answer) - 1", "position = len(prompt) + len(answer)"),
    ("P1", "01.2", "position = len(prompt) + len(answer) - 1", "position = len(answer)"),
    ("P1", "01.3", "model(piece, done, cache)", "model(piece, 0, cache)"),
    ("P5", "01.3", "model(piece, done, cache)", "model(piece, done - num_cached, cache)"),
    ("M4", "01.3", "model(piece, done, cache)", "model(piece, done, model.new_cache())"),
    ("M4", "01.3", "model(piece, done, cache)", "model(piece, done)"),
    ("K2", "01.3", "done = num_cached", "done = 0"),
    ("A5", "01.3", "while done < len(prompt):", "while done <= len(prompt):"),
    ("I8", "01.3", "while done < len(prompt):", "while done + piece_size <= len(prompt):"),
]

COSTS = [
    ("K1", "01.2", "model(answer[-1:], position, cache)", "model([*prompt, *answer], 0, model.new_cache())"),
    ("K1", "01.2", "model(answer[-1:], position, cache)", "model([*prompt, *answer], 0)"),
    ("C11", "01.3", "prompt[done : done + piece_size]", "prompt[done : done + 1]"),
]

ALSO_RIGHT = {
    "01.1": [
        '''
def generate_naive(model, prompt, max_tokens, eos_token_id=None):
    answer = ()
    for _ in range(max_tokens):
        answer += (model(tuple(prompt) + answer, 0, None),)
        if answer[-1] == eos_token_id:
            return answer
    return answer
''',
        '''
import torch

def generate_naive(model, prompt, max_tokens, eos_token_id=None):
    text = torch.tensor(prompt)
    new = []
    while len(new) < max_tokens and (not new or new[-1] != eos_token_id):
        new.append(model(text.tolist(), start_pos=0, cache=model.new_cache()))
        text = torch.cat([text, torch.tensor(new[-1:])])
    return text[len(prompt):]
''',
    ],
    "01.2": [
        '''
def generate_cached(model, prompt, max_tokens, eos_token_id=None):
    cache, todo, start, answer = model.new_cache(), list(prompt), 0, []
    for _ in range(max_tokens):
        token = model(todo, start, cache)
        start += len(todo)
        todo = [token]
        answer.append(token)
        if token == eos_token_id:
            break
    return answer
''',
        '''
def generate_cached(model, prompt, max_tokens, eos_token_id=None):
    def tokens():
        cache = model.new_cache()
        for position, token in enumerate(prompt):
            following = model((token,), position, cache)
        while True:
            yield following
            if following == eos_token_id:
                return
            position += 1
            following = model((following,), position, cache)
    return tuple(token for _, token in zip(range(max_tokens), tokens()))
''',
    ],
    "01.3": [
        '''
def prefill_in_pieces(model, prompt, piece_size, cache, num_cached=0):
    return [model(prompt[start:start + piece_size], start, cache) for start in range(num_cached, len(prompt), piece_size)][-1]
''',
        '''
import numpy as np

def prefill_in_pieces(model, prompt, piece_size, cache, num_cached=0):
    rest = np.array(prompt[num_cached:])
    position = np.int64(num_cached)
    while len(rest):
        head, rest = rest[:piece_size], rest[piece_size:]
        token = model(head, position, cache)
        position += len(head)
    return np.int64(token)
''',
    ],
}
