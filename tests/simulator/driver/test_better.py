"""Which way a metric is better, by its name."""

import pytest

from fedfleet.simulator.driver.evaluation import less_is_better

LESS = "loss error mse nll perplexity regret duality_gap misclassified wrong_words transport_cost distance kl_divergence kl risk"
MORE = "accuracy auc inception_score score distance_score mission_success confidence recall mission psnr loss_score"


@pytest.mark.parametrize("name", LESS.split())
def test_less_is_better(name):
    assert less_is_better(name)
    assert less_is_better(f"eval/train_{name}")
    assert less_is_better(f"eval/{name}_worst_domain")


@pytest.mark.parametrize("name", MORE.split())
def test_more_is_better_but_of_a_spread(name):
    assert not less_is_better(f"eval/{name}")
    assert not less_is_better(f"eval/{name}_worst_tenth")
    assert less_is_better(f"eval/{name}_spread")
    assert less_is_better(f"eval/gap_{name}")


def test_a_task_says_it_by_the_end_of_a_name():
    assert less_is_better("eval/agreement_loss")
    assert not less_is_better("eval/error_score")
