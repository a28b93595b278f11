"""Compares the first and the last adapter of a run of edit.py on prompts that were not trained, and
draws the first eight: instruction, source, before, after.

    python -m examples.edited runs/edit runs/squares/held_out.txt edit.png
"""
import sys
from pathlib import Path

import grpo
from examples.codes import load_prompts, load_rewards
from examples.edit import EditWrapper
from examples.evaluate import draw_film, evaluate, print_table

def main(run, prompts_path, film_path):
    try:
        config = grpo.parse_args(["--resume", run])
        prompts, sources = load_prompts(prompts_path)
        rewards = load_rewards(config.reward)
    except grpo.BadInput as error:
        sys.exit(f"edited.py: error: {error}")
    wrapper = EditWrapper.from_pretrained(config.model, config)
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
    adapters = sorted(Path(run).glob("adapter_[0-9]*"))
    adapters = [adapters[0], adapters[-1]]
    results, images = zip(*evaluate(wrapper, lora, adapters, prompts, sources, rewards))
    labels = ["before", "after"]
    print_table(labels, results)
    instructions = [prompt.split("\t")[0] for prompt in prompts]
    film = draw_film(["source", *labels], [sources, *images], instructions)
    film.quantize(64).save(film_path)  # a small file

if __name__ == "__main__":
    main(*sys.argv[1:])
