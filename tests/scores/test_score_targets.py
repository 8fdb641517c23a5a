"""A score compares one value per coordinate; what would only broadcast is refused."""

import pytest
import torch
from support.laws import FAMILY_SCORES, random_law

from marigold_uq.scores import SCORES, mean_score, sample_scores


@pytest.mark.parametrize(("name", "score"), FAMILY_SCORES)
def test_a_target_that_only_broadcasts_is_an_error(name: str, score: str) -> None:
    law = random_law(name, (1,))
    column = torch.zeros(law.shape[0], dtype=torch.float64)  # y instead of y[:, None]
    for function in (SCORES[score], lambda d, v: mean_score(d, v, score), lambda d, v: sample_scores(d, v, score)):
        with pytest.raises(ValueError, match="one value per coordinate"):
            function(law, column)
