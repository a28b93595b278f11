"""Compares the first and the last adapter of a run of edit.py on prompts that were not trained, and
draws the first eight: instruction, source, before, after.

    python -m examples.edited runs/edit runs/squares/held_out.txt edit.png
"""
import argparse
from pathlib import Path

import grpo
from examples.codes import load_prompts, load_rewards
from examples.edit import EditWrapper
from examples.evaluate import draw_film, evaluate, print_table

def main():
    parser = argparse.ArgumentParser(description="Compares the first and last adapter of a run.")
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("prompts", help="file of lines `instruction<TAB>source.png`")
    parser.add_argument("film", help="picture to draw, such as edit.png")
    typed = parser.parse_args()
    try:
        config = grpo.parse_args(["--resume", typed.run])
        prompts, sources = load_prompts(typed.prompts)
        rewards = load_rewards(config.reward)
        if not Path(typed.film).absolute().parent.is_dir():
            raise grpo.BadInput(f"{typed.film}: its folder does not exist")
    except grpo.BadInput as error:
        message = " ".join(str(error).split())
        parser.exit(2, f"edited.py: error: {message}\n")
    wrapper = EditWrapper.from_pretrained(config.model, config)
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
    adapters = sorted(Path(typed.run).glob("adapter_[0-9]*"))
    adapters = [adapters[0], adapters[-1]]
    results, images = zip(*evaluate(wrapper, lora, adapters, prompts, sources, rewards))
    labels = ["before", "after"]
    print_table(labels, results)
    instructions = [prompt.split("\t")[0] for prompt in prompts]
    film = draw_film(["source", *labels], [sources, *images], instructions)
    film.quantize(64).save(typed.film)  # a small file

if __name__ == "__main__":
    main()
