"""The bundled language-model tasks: the large and the small LSTM of Zaremba et al. 2014, on any text folder.

The paper sums the loss over the 35 tokens of a window where we average, so its learning rate 1.0 and gradient norm 10
(large) or 5 (small) are 35 and 10/35 or 5/35 here; 20 and 0.25 are the customary round values on that scale.
"""

from __future__ import annotations

from functools import partial

from hetopt.trainer.task import Target, Task
from hetopt.trainer.tasks.corpus import load_corpus
from hetopt.trainer.tasks.lstm import LSTMLanguageModel
from hetopt.trainer.tasks.recipes import epoch_decay, language_model, sgd

VOCABULARY_SIZE = 10_000
"""The whole vocabulary of the prepared Penn Treebank; larger corpora are cut to it."""

WINDOW = 35


def lstm_ptb() -> Task:
    """Return the large model: two layers of 1500, 66 million parameters (264 MB).

    The paper reports a validation perplexity of 82.2 with state carried between windows. Windows start from zero here,
    hence the looser target. (The 22.0 that compression papers quote for this model on Penn Treebank is below any
    published validation perplexity of it, so it must be of the training text.)
    """
    return language_model(
        name="lstm-ptb",
        model=partial(
            LSTMLanguageModel, vocabulary_size=VOCABULARY_SIZE, width=1500, layers=2, dropout=0.65, initial_range=0.04
        ),
        data=partial(load_corpus, vocabulary_size=VOCABULARY_SIZE, window=WINDOW),
        optimizer=sgd(20.0, momentum=0.0, max_gradient_norm=0.25),
        schedule=epoch_decay(after=14, factor=1 / 1.15),
        usual_epochs=55,
        target=Target(metric="perplexity", value=100.0, higher_is_better=False),
        batch_size=20,
        evaluation_batch_size=20,
    )


def lstm_small() -> Task:
    """Return the small model: two layers of 200, 4.7 million parameters (19 MB), which a laptop can train.

    The paper reports a validation perplexity of 120.7 on Penn Treebank with state carried between windows.
    """
    return language_model(
        name="lstm-small",
        model=partial(
            LSTMLanguageModel, vocabulary_size=VOCABULARY_SIZE, width=200, layers=2, dropout=0.0, initial_range=0.1
        ),
        data=partial(load_corpus, vocabulary_size=VOCABULARY_SIZE, window=WINDOW),
        optimizer=sgd(20.0, momentum=0.0, max_gradient_norm=0.25),
        schedule=epoch_decay(after=4, factor=0.5),
        usual_epochs=13,
        target=Target(metric="perplexity", value=150.0, higher_is_better=False),
        batch_size=20,
    )
