# %% [markdown]
# # Exercises 01 · Prefill and decode
#
# [Lesson 01](../notebooks/01_prefill_and_decode.ipynb) asked a model one question again and again. Now you write what
# asks: three functions of a few lines each, first tried on a model that notes every call, then on SmolLM2.
#
# `model(token_ids, start_pos, cache)` returns the id of the token that follows. The first of `token_ids` stands at position
# `start_pos` of the text; the tokens before it are in `cache`, which takes up these too. Without a cache (`None`),
# nothing comes before them. `model.new_cache()` makes an empty one.

# %% name="set-up"
from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model
from course_lib.checks import NotDone, check
from course_lib.lab import show
from course_lib.lab.calls import calls_map, calls_map_alt
from course_lib.model.plain import PlainModel

# %% [markdown] name="task-01-1"
# ## 01.1 generate() without a cache
#
# Return the new tokens that follow a prompt, at most `max_tokens` of them. There is no cache, so the model gets the whole text
# every time, and the text grows by the token that it said.
#
# ```text
# prompt [7, 8], max_tokens=3
#
#   model([7, 8], 0)            says 21      position 0 1
#   model([7, 8, 21], 0)        says 5       position 0 1 2
#   model([7, 8, 21, 5], 0)     says 9       position 0 1 2 3
#
# returned: [21, 5, 9]          9 tokens went through the model
# ```

# %% name="your-01-1"
def generate_naive(model, prompt, max_tokens, eos_token_id=None):
    """The tokens that the model puts after `prompt`, without a KV cache.

    model         called as model(token_ids, start_pos); returns the id of the next token
    prompt        list of token ids, at least one; it isn't changed
    max_tokens    most new tokens, at least 1
    eos_token_id  the answer ends with this token, if the model says it; it belongs to the answer
    Returns the new token ids, without the prompt.
    """
    ### BEGIN SOLUTION
    text = list(prompt)
    while len(text) < len(prompt) + max_tokens:
        next_token = model(text, 0)
        text.append(next_token)
        if next_token == eos_token_id:
            break
    return text[len(prompt) :]
    ### END SOLUTION

# %% name="check-01-1"
check("01.1", generate_naive)

# %% [markdown] name="hints-01-1"
# <details><summary>Hint 1: the rule</summary>
#
# Without a cache the model knows nothing but what you send. So you send everything, prompt and new tokens, and it begins at
# position 0 every time.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# If you send the newest token alone, the model continues a text that consists of that token. For a prompt of a single
# token, the first answer is even right.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Copy the prompt into a list. As often as there may be new tokens: ask about the list, append what comes back, stop
# if it was the end-of-sequence token. Give back the part of the list behind the prompt.
#
# </details>

# %% name="run-01-1" tags=["needs-your-code"]
loaded = load_model("smollm2", device="cpu")
model = PlainModel(loaded)
prompt = demo.chat_prompt(loaded.tokenizer, "What is a lighthouse for?")

answer = generate_naive(model, prompt, 16, loaded.tokenizer.eos_token_id)

print(loaded.tokenizer.decode(answer))
panels = {"SmolLM2 by your generate_naive": model.calls}
show(calls_map(panels), calls_map_alt(panels))

# %% [markdown] name="task-01-2"
# ## 01.2 generate() with a KV cache
#
# Return the same tokens, and send each token through the model only once. The first call brings the prompt (that is the
# prefill), each further call brings the one token that has no keys and values yet (a decode).
#
# ```text
# prompt [7, 8], max_tokens=3
#                                         in the cache afterwards
#   model([7, 8], 0, cache)    says 21    positions 0 1
#   model([21],   ?, cache)    says 5     positions 0 1 2
#   model([5],    ?, cache)    says 9     positions 0 1 2 3
#
# returned: [21, 5, 9]         4 tokens went through the model
# ```

# %% name="your-01-2"
def generate_cached(model, prompt, max_tokens, eos_token_id=None):
    """The tokens that the model puts after `prompt`, each token computed once.

    model         called as model(token_ids, start_pos, cache); model.new_cache() makes an empty cache
    prompt        list of token ids, at least one; it isn't changed
    max_tokens    most new tokens, at least 1
    eos_token_id  the answer ends with this token, if the model says it; it belongs to the answer
    Returns the new token ids, without the prompt.
    """
    ### BEGIN SOLUTION
    cache = model.new_cache()
    answer = [model(prompt, 0, cache)]
    while len(answer) < max_tokens and answer[-1] != eos_token_id:
        position = len(prompt) + len(answer) - 1
        answer.append(model(answer[-1:], position, cache))
    return answer
    ### END SOLUTION

# %% name="check-01-2"
check("01.2", generate_cached)

# %% [markdown] name="hints-01-2"
# <details><summary>Hint 1: the rule</summary>
#
# A call brings exactly the tokens that have no keys and values in the cache yet. `start_pos` is the position of the first
# of them in the whole text, so it equals the number of tokens in the cache.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Prompt of 2 tokens, first new token 21. If you now send `[7, 8, 21]` with the filled cache, the model reads a text of
# five tokens: 7, 8, 7, 8, 21. And 21 is the third token of the text: its position isn't 3.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Make a cache; ask about the prompt; what comes back is the first new token. As long as there may be more and the newest
# isn't the end: ask about the newest alone, at the position behind the prompt and all new tokens before it.
#
# </details>

# %% name="run-01-2" tags=["needs-your-code"]
loaded = load_model("smollm2", device="cpu")
model = PlainModel(loaded)
prompt = demo.chat_prompt(loaded.tokenizer, "What is a lighthouse for?")

answer = generate_cached(model, prompt, 24, loaded.tokenizer.eos_token_id)

engine = Engine(ModelRunner(loaded))
expected = engine.generate([prompt], SamplingParams(max_tokens=24))[0].token_ids
print(loaded.tokenizer.decode(answer))
print("the engine's tokens are the same:", answer == expected)
panels = {"SmolLM2 by your generate_cached": model.calls}
show(calls_map(panels), calls_map_alt(panels))

# %% [markdown] name="task-01-3"
# ## 01.3 A cache filled bit by bit
#
# Fill a cache with a prompt in pieces of at most `piece_size` tokens and return the first new token. Part of the prompt may be
# in the cache already: go on from there.
#
# ```text
# prompt of 7 tokens, piece_size 3, nothing cached
#
#   position   0 1 2 3 4 5 6
#   call 1     ■ ■ ■               an answer that nobody needs
#   call 2           ■ ■ ■         an answer that nobody needs
#   call 3                 ■       the first new token
# ```

# %% name="your-01-3"
def prefill_in_pieces(model, prompt, piece_size, cache, num_cached=0):
    """Put the rest of `prompt` into `cache`, piece by piece; the first new token comes back.

    model       called as model(token_ids, start_pos, cache); a call with no token is an error
    prompt      list of token ids, longer than num_cached
    piece_size  most tokens in one call, at least 1
    cache       holds the first num_cached tokens of the prompt; holds all of them afterwards
    Returns the id of the token that follows the prompt.
    """
    ### BEGIN SOLUTION
    done = num_cached
    while done < len(prompt):
        piece = prompt[done : done + piece_size]
        first_token = model(piece, done, cache)
        done += len(piece)
    return first_token
    ### END SOLUTION

# %% name="check-01-3"
check("01.3", prefill_in_pieces)

# %% [markdown] name="hints-01-3"
# <details><summary>Hint 1: the rule</summary>
#
# Keep one count: how many tokens of the prompt are in the cache. It says where the next piece begins, which position its
# first token has, and when you are done.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Prompt of 8, pieces of 4. If the second piece is numbered from 0, two tokens stand at position 0, and the
# answer is another one. With prompts that fit in one piece you would never notice.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# As long as the count is below the prompt's length: cut out the next piece, ask about it at the position that the count
# gives, add the piece's length to the count. Return what the last call said.
#
# </details>

# %% name="run-01-3" tags=["needs-your-code"]
loaded = load_model("smollm2", device="cpu")
document = loaded.tokenizer.encode(demo.document_text())[:200]

whole, piecewise = PlainModel(loaded), PlainModel(loaded)
expected = whole(document, 0, whole.new_cache())
first_token = prefill_in_pieces(piecewise, document, 64, piecewise.new_cache())

engine = Engine(ModelRunner(loaded), EngineConfig(max_prefill_chunk_size=64))
engine.generate([document], SamplingParams(max_tokens=1))
chunks = [(chunk.start_pos, chunk.num_tokens) for step in engine.trace.steps for chunk in step.chunks]

print("the next token is the same as in one piece:", first_token == expected)
print("the engine's chunks of this prompt are your pieces:", chunks == piecewise.calls)
panels = {"One piece": whole.calls, "Your pieces of 64": piecewise.calls}
show(calls_map(panels), calls_map_alt(panels))
