"""Makes a small Janus that `examples/janus.py` trains without a GPU, in the folder runs/janus.

    python -m examples.make.small_janus    # about half a minute
    python grpo.py --wrapper examples/janus.py:Janus --model runs/janus

It has Janus's real classes, with 0.4 million weights. A picture has 4 x 4 squares, and each of its
16 codes is one of the eight COLORS of grpo.py. The policy is fitted until it half knows the words:
a square has the prompt's color with probability .3, or else any other. GRPO teaches it the rest.
"""
from examples.make import read_folder

if __name__ == "__main__":
    FOLDER = read_folder(__doc__, "runs/janus")

import torch
import transformers

import grpo
from examples import janus
from examples.make import tiny

SIDE = 4  # squares in a row and in a column
PALETTE = torch.stack(list(grpo.COLORS.values()))  # [V, 3], in 0..1
V = len(PALETTE)
WIDTH = 64  # of the language model

# The defaults of grpo.py when it trains this model.
SETTINGS = dict(steps=40, group_size=8, micro_batch_size=64, lr=1e-3, width=32, height=32,
                guidance=1.5)

def make_processor():
    """Its tokenizer knows the words of the tiny GLM-Image, whose marks serve Janus, too."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny.make_tokenizer(grpo.COLORS).backend_tokenizer,
        bos_token="<|tiny_bos|>", eos_token="<|tiny_eos|>", pad_token="<|tiny_pad|>",
        unk_token="<|tiny_unk|>", model_specific_special_tokens=dict(
            image_token="<|tiny_image|>", boi_token="<|tiny_grid_bos|>",
            eoi_token="<|tiny_grid_eos|>"))
    return transformers.JanusProcessor(
        transformers.JanusImageProcessorPil(), tokenizer, num_image_tokens=SIDE**2,
        chat_template="{{ bos_token }}{{ messages[0].content[0].text }}")

def make_policy(tokenizer):
    """-> a JanusForConditionalGeneration of random weights."""
    text_config = dict(
        model_type="llama", vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, initializer_range=0.1)
    vision_config = dict(
        image_size=16 * SIDE, num_image_tokens=SIDE**2, hidden_size=16, num_hidden_layers=0,
        num_attention_heads=1, projection_dim=WIDTH)
    vq_config = dict(
        num_embeddings=V, embed_dim=V, latent_channels=32, base_channels=32, num_res_blocks=0,
        channel_multiplier=[2, 1, 1, 1], projection_dim=WIDTH, image_token_embed_dim=WIDTH)
    policy = transformers.JanusForConditionalGeneration(transformers.JanusConfig(
        text_config=text_config, vision_config=vision_config, vq_config=vq_config,
        image_token_id=tokenizer.image_token_id))
    policy.generation_config = transformers.GenerationConfig(
        do_sample=True, bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
        generation_kwargs=dict(boi_token_id=tokenizer.boi_token_id))
    # LoRA leaves the head as it is, so large logits must be within its reach.
    torch.nn.init.constant_(policy.model.language_model.norm.weight, 4.0)
    return policy

@torch.no_grad()
def set_painter(vq):
    """Sets the VQ decoder's weights so that code k is a square of PALETTE[k]. They are not fitted:
    group norm subtracts from two channels their mean over all of the picture, and divides by their
    std, so that a fitted decoder lets the color of a square depend on all the others. Here the two
    are 1 and -1 for the squares of one code, and -1 and 1 for those of others: mean 0, std 1."""
    decoder = vq.decoder
    for weight in decoder.parameters():
        weight.zero_()  # a block adds nothing to what it is given
    vq.quantize.embedding.weight.copy_(torch.eye(V))
    torch.nn.init.dirac_(vq.post_quant_conv.weight)
    vq.post_quant_conv.weight.mul_(2)
    vq.post_quant_conv.bias.fill_(-1)  # channel k is 1 for code k, and -1 for others
    for conv in [decoder.conv_in, *[level.upsample.conv for level in decoder.up[:-1]]]:
        torch.nn.init.dirac_(conv.weight)  # it changes nothing
    double = torch.tensor([[1.0], [-1.0]])
    shortcut = decoder.up[-1].block[0].nin_shortcut.weight  # [64, 32, 1, 1]
    shortcut.copy_(torch.kron(torch.eye(32), double)[:, :, None, None])
    decoder.norm_out.weight.fill_(1)
    # Swish makes 1 and -1 to s and s - 1.
    colors = 2 * PALETTE - 1
    decoder.conv_out.weight[:, :2 * V:2, 1, 1] = colors.T
    decoder.conv_out.bias.copy_(colors.sum(0) * torch.sigmoid(torch.tensor(-1.0)))

def fit_policy(wrapper, steps, chance=0.3, lr=5e-3):
    """Fits the policy so that each code is right with this chance, and all others are equally
    likely. Some prompts are left empty, so that it can be guided."""
    model = wrapper.policy.model.eval()  # no activations are computed again: this is faster

    def compute_loss():
        prompts, right = tiny.draw_color_prompts()
        N = len(prompts)
        chances = torch.full((N, SIDE**2, V), (1 - chance) / (V - 1))
        chances.scatter_(2, right[:, :, None], chance)
        codes = torch.distributions.Categorical(chances).sample().to(grpo.DEVICE)
        ids, mask, _ = wrapper.encode(prompts)
        inputs = wrapper.embed(torch.cat([ids, codes[:, :-1]], 1))
        rows = torch.arange(N) + N * (torch.rand(N) < 0.15)  # the empty prompts come last
        hidden = model.language_model(
            inputs_embeds=inputs[rows], attention_mask=mask[:, :-1],
            use_cache=False).last_hidden_state
        logprobs = model.generation_head(hidden[:, -SIDE**2:]).log_softmax(2)
        return -(chances.to(grpo.DEVICE) * logprobs).sum(2).mean()  # cross entropy

    tiny.minimize(compute_loss, [
        model.language_model, model.generation_embeddings, model.generation_aligner,
        model.generation_head], steps, lr)

def main(folder):
    tiny.make_folder(folder)
    transformers.set_seed(0)
    processor = make_processor()
    policy = make_policy(processor.tokenizer)
    set_painter(policy.model.vqmodel)
    fit_policy(janus.Janus(processor, policy, grpo.Config(**SETTINGS)), steps=300)
    processor.save_pretrained(folder)
    tiny.save(policy, SETTINGS, folder)

if __name__ == "__main__":
    main(FOLDER)
