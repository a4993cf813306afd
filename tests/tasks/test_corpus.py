"""Penn Treebank, WikiText and plain text folders become the same windows of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import fetch, inputs_and_targets
from hetopt.trainer.tasks.language import build_vocabulary, encode, find_corpus, load_corpus, windows

TRAIN = " the cat sat on the mat \n the dog sat \n\n a <unk> cat \n" * 8
OTHER = " the cow sat on the cat \n" * 6

NAMINGS = ["ptb.{}.txt", "wiki.{}.tokens", "wiki.{}.txt", "{}.txt", "{}.tokens"]


def write(folder: Path, naming: str, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for role, text in texts.items():
        (folder / naming.format(role)).write_text(text)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("inside", [".", "simple-examples/data", "wikitext-2"])
def test_every_naming_gives_the_same_samples(tmp_path: Path, naming: str, inside: str) -> None:
    write(tmp_path / inside, naming, train=TRAIN, valid=OTHER, test="not looked at")
    data = load_corpus(tmp_path, vocabulary_size=100, window=5)
    inputs, targets = inputs_and_targets(fetch(data.train, [0, 1]))
    vocabulary = build_vocabulary({w: TRAIN.split().count(w) for w in TRAIN.split()}, 100)
    words = {number: word for word, number in vocabulary.items()}
    assert [words[int(i)] for i in inputs[0]] == ["the", "cat", "sat", "on", "the"]
    assert [words[int(i)] for i in targets[0]] == ["cat", "sat", "on", "the", "mat"]
    assert [words[int(i)] for i in inputs[1]] == ["mat", "<eos>", "the", "dog", "sat"]


def test_words_outside_the_vocabulary_are_unknown_and_empty_lines_end_too(tmp_path: Path) -> None:
    write(tmp_path, "{}.txt", text="the cow\n\nunseen the")
    tokens = encode(tmp_path / "text.txt", {"<unk>": 0, "<eos>": 1, "the": 2, "cow": 3})
    assert tokens.tolist() == [2, 3, 1, 1, 0, 2, 1]


@given(
    counts=st.dictionaries(st.text("abcde", min_size=1, max_size=3), st.integers(1, 50), max_size=40),
    size=st.integers(2, 50),
)
def test_a_vocabulary_keeps_the_most_frequent_words(counts: dict[str, int], size: int) -> None:
    vocabulary = build_vocabulary(counts, size)
    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(vocabulary) == min(size, len(counts) + 2)
    assert (vocabulary["<unk>"], vocabulary["<eos>"]) == (0, 1)
    kept = [counts[word] for word in list(vocabulary)[2:]]
    assert kept == sorted(kept, reverse=True)
    dropped = [count for word, count in counts.items() if word not in vocabulary]
    assert not dropped or not kept or max(dropped) <= min(kept)
    assert vocabulary == build_vocabulary(dict(reversed(counts.items())), size)


@given(length=st.integers(2, 200), window=st.integers(1, 40))
def test_windows_cover_the_text_once_and_targets_are_one_further(length: int, window: int) -> None:
    tokens = torch.arange(length)
    if length <= window:
        with pytest.raises(BadInput, match="too few"):
            windows(tokens, window, source=Path("x"))
        return
    pairs = windows(tokens, window, source=Path("x"))
    assert torch.equal(pairs.inputs.flatten(), tokens[: len(pairs) * window])
    assert torch.equal(pairs.targets, pairs.inputs + 1)
    assert length - 1 - len(pairs) * window < window


@pytest.mark.parametrize(
    ("roles", "train", "evaluation"),
    [
        (("train", "valid", "test"), "train", "valid"),
        (("train", "test"), "train", "test"),
        (("valid", "test"), "valid", "test"),
    ],
)
def test_which_files_train_and_evaluate(tmp_path: Path, roles: tuple[str, ...], train: str, evaluation: str) -> None:
    write(tmp_path, "wiki.{}.tokens", **dict.fromkeys(roles, TRAIN))
    files = find_corpus(tmp_path)
    assert files.train.name == f"wiki.{train}.tokens"
    assert files.evaluation.name == f"wiki.{evaluation}.tokens"
    assert ("no training file" in files.note) == ("train" not in roles)


def test_a_training_file_of_another_naming_wins_over_the_fallback(tmp_path: Path) -> None:
    write(tmp_path, "ptb.{}.txt", valid=TRAIN, test=TRAIN)
    write(tmp_path, "{}.txt", train=TRAIN, valid=TRAIN)
    assert find_corpus(tmp_path).train.name == "train.txt"


def test_folders_with_braces_in_their_name_work(tmp_path: Path) -> None:
    write(tmp_path / "{}", "{}.txt", train=TRAIN, valid=OTHER)
    assert find_corpus(tmp_path / "{}").train.name == "train.txt"


def test_the_real_sample_trains_on_valid_and_evaluates_on_test(shared_data: Path) -> None:
    data = load_corpus(shared_data / "wikitext-2", vocabulary_size=10_000, window=35)
    # 213,886 and 241,211 words and 3,760 and 4,358 line ends, in windows of 35 with one token after the last.
    assert len(data.train) == (213_886 + 3_760 - 1) // 35
    assert len(data.evaluation) == (241_211 + 4_358 - 1) // 35
    assert "no training file" in data.description
    assert "vocabulary 10,000 of 13,777 words" in data.description
    inputs, _ = inputs_and_targets(fetch(data.evaluation, range(len(data.evaluation))))
    assert int(inputs.max()) < 10_000


# --- bad input --------------------------------------------------------------------------------------------------------


def load(folder: Path | None) -> None:
    load_corpus(folder, vocabulary_size=100, window=35)


def test_a_folder_is_needed(tmp_path: Path) -> None:
    for folder, said in ((None, "needs a data folder"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(BadInput, match=said):
            load(folder)


@pytest.mark.parametrize("roles", [(), ("train",), ("test",)])
def test_no_pair_of_files(tmp_path: Path, roles: tuple[str, ...]) -> None:
    write(tmp_path, "{}.txt", **dict.fromkeys(roles, TRAIN))
    with pytest.raises(BadInput, match="no pair of text files") as caught:
        load(tmp_path)
    for name in ("ptb.train.txt", "wiki.train.tokens", "train.txt"):
        assert name in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("train", "valid", "said"),
    [
        (TRAIN.encode(), b"two words", r"valid\.txt has 3 tokens"),
        (b"", OTHER.encode(), r"train\.txt has 0 tokens"),
        (b"fine so far \xff\xfe", OTHER.encode(), r"train\.txt cannot be read: not UTF-8 text"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(tmp_path: Path, train: bytes, valid: bytes, said: str) -> None:
    (tmp_path / "train.txt").write_bytes(train)
    (tmp_path / "valid.txt").write_bytes(valid)
    with pytest.raises(BadInput, match=said):
        load(tmp_path)
