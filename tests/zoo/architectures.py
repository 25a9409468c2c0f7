"""Published architectures at tiny size, built from their configurations with random weights."""

import torch
import torch.nn.functional as F

from zoo.cases import BATCH, Net, Pen, tokens

PEN = Pen()

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
TEXT = {"vocab_size": 11, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = SMALL | {"vocab_size": 11, "pad_token_id": 0, "max_position_embeddings": 12, "type_vocab_size": 2}
DECODER = SMALL | TEXT | {"max_position_embeddings": 12, "use_cache": False}
GROUPED = DECODER | {"num_key_value_heads": 1, "head_dim": 4}
SEQ2SEQ = TEXT | {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
IMAGE = SMALL | {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3}


def logits(net, x):
    return net.model(x).logits


def hidden(net, x):
    return net.model(x).last_hidden_state


def hidden_of_embedded(net, x):
    return net.model(inputs_embeds=x).last_hidden_state


def logits_of_embedded(net, x):
    return net.model(inputs_embeds=x).logits


def from_and_to(net, x):
    """The output of an encoder and decoder, both of which are given the same tokens."""
    return net.model(input_ids=x, decoder_input_ids=x).logits


def from_sound(net, x):
    return net.model(input_features=x, decoder_input_ids=net.target).last_hidden_state


def image_and_text(net, x):
    """The scores of every image with every text, from both sides: each row sees the whole batch."""
    output = net.model(pixel_values=x, input_ids=net.target)
    return output.logits_per_image, output.logits_per_text


def pretraining_losses(net, scores):
    return F.cross_entropy(scores.transpose(1, 2), net.target, reduction="none").mean(1)


def image_and_text_losses(_, scores):
    return sum(F.cross_entropy(score, torch.arange(BATCH), reduction="none") for score in scores)


def enlarge(model):
    """Weights large enough for the width: those of the configurations' own size leave next to no gradient here."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.3 * noise)


def architecture(kind, run, config, *, train=False):
    """A model of `transformers` by name, whose import takes long enough to be left to those who build one."""
    import transformers

    model = getattr(transformers, kind)
    model = model(model.config_class(**config)).train(train)
    enlarge(model)
    return Net(run, model=model, target=torch.randint(3, 11, (BATCH, 4)))


def add(name, inputs, kind, run, config, *traits, train=False, **options):
    PEN.add(name, inputs, lambda: architecture(kind, run, config, train=train), "architecture", *traits, **options)


def add_text(name, kind, run, config, *traits, **options):
    add(name, tokens(4), kind, run, config, *traits, **options)


def add_embedded(name, kind, run, config, *traits, **options):
    add(name, (4, 8), kind, run, config, *traits, **options)


def add_image(name, kind, config, *traits, **options):
    add(name, (2, 8, 8), kind, logits, config, *traits, **options)


add_text("bert", "BertForMaskedLM", logits, ENCODER, "transformer", "vanishing", "tied", losses=pretraining_losses)
add_text(
    "bert in training, with dropout",
    "BertModel",
    hidden,
    ENCODER,
    "transformer",
    "unused",
    "vanishing",
    "random",
    train=True,
)
add_embedded("bert on embeddings", "BertModel", hidden_of_embedded, ENCODER, "transformer", "unused", "vanishing")
add_embedded(
    "bert, eager attention",
    "BertModel",
    hidden_of_embedded,
    ENCODER | {"attn_implementation": "eager"},
    "transformer",
    "unused",
    "vanishing",
)
add_embedded("roberta", "RobertaModel", hidden_of_embedded, ENCODER, "transformer", "unused", "vanishing")
add_embedded(
    "electra", "ElectraModel", hidden_of_embedded, ENCODER | {"embedding_size": 8}, "transformer", "unused", "vanishing"
)
add_embedded(
    "albert",
    "AlbertModel",
    hidden_of_embedded,
    ENCODER | {"embedding_size": 8},
    "transformer",
    "unused",
    "vanishing",
    "reused",
)
add_text(
    "distilbert",
    "DistilBertModel",
    hidden,
    {"vocab_size": 11, "max_position_embeddings": 12, "n_layers": 2, "n_heads": 2, "dim": 8, "hidden_dim": 12},
    "transformer",
    "vanishing",
)
add_embedded(
    "deberta",
    "DebertaV2Model",
    hidden_of_embedded,
    ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
    "transformer",
    "unused",
    "vanishing",
)
add_embedded("fnet", "FNetModel", hidden_of_embedded, ENCODER, "complex", "unused")
GPT2 = TEXT | {"n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 12, "use_cache": False}
add_text("gpt-2", "GPT2LMHeadModel", logits, GPT2, "transformer", "tied", losses=pretraining_losses)
add_embedded("gpt-2 on embeddings", "GPT2LMHeadModel", logits_of_embedded, GPT2, "transformer", "tied")
add_embedded("gpt-neox", "GPTNeoXForCausalLM", logits_of_embedded, DECODER, "transformer", "unused")
add_embedded(
    "bloom", "BloomForCausalLM", logits_of_embedded, TEXT | {"hidden_size": 8, "n_layer": 2, "n_head": 2}, "transformer"
)
add_embedded(
    "opt",
    "OPTForCausalLM",
    logits_of_embedded,
    DECODER | {"ffn_dim": 12, "word_embed_proj_dim": 8},
    "transformer",
    "vanishing",
    "tied",
)
add_text("llama", "LlamaForCausalLM", logits, GROUPED, "transformer", losses=pretraining_losses)
add_embedded("llama on embeddings", "LlamaForCausalLM", logits_of_embedded, GROUPED, "transformer", "unused")
add_embedded(
    "mistral", "MistralForCausalLM", logits_of_embedded, GROUPED | {"sliding_window": 2}, "transformer", "unused"
)
add_embedded("qwen", "Qwen2ForCausalLM", logits_of_embedded, GROUPED, "transformer", "unused")
add_embedded("gemma", "Gemma2ForCausalLM", logits_of_embedded, GROUPED, "transformer", "tied")
add_embedded("phi", "PhiForCausalLM", logits_of_embedded, DECODER, "transformer", "unused")
add_embedded(
    "mixtral",
    "MixtralForCausalLM",
    logits_of_embedded,
    GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "transformer",
    "unused",
    "routing",
)
MAMBA = TEXT | {"hidden_size": 8, "state_size": 3, "num_hidden_layers": 2, "time_step_rank": 2, "use_cache": False}
add_text("mamba", "MambaForCausalLM", logits, MAMBA, "tied")
add_embedded("mamba on embeddings", "MambaForCausalLM", logits_of_embedded, MAMBA, "tied")
add_embedded(
    "rwkv",
    "RwkvModel",
    hidden_of_embedded,
    TEXT
    | {"hidden_size": 8, "attention_hidden_size": 8, "num_hidden_layers": 2, "context_length": 4, "use_cache": False},
    "unused",
)
add_text(
    "t5",
    "T5ForConditionalGeneration",
    from_and_to,
    {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "use_cache": False},
    "transformer",
    "tied",
)
add_text(
    "bart",
    "BartForConditionalGeneration",
    from_and_to,
    SEQ2SEQ | {"max_position_embeddings": 12},
    "transformer",
    "vanishing",
    "tied",
)
add(
    "whisper",
    (4, 8),
    "WhisperModel",
    from_sound,
    SEQ2SEQ | {"num_mel_bins": 4, "max_source_positions": 4, "max_target_positions": 6, "suppress_tokens": None},
    "transformer",
    "conv",
)
add(
    "wav2vec",
    (40,),
    "Wav2Vec2Model",
    hidden,
    SMALL
    | {"conv_dim": [4, 4], "conv_stride": [4, 2], "conv_kernel": [4, 2], "num_feat_extract_layers": 2}
    | {"num_conv_pos_embeddings": 3, "num_conv_pos_embedding_groups": 2},
    "transformer",
    "unused",
    "vanishing",
    "conv",
    "parametrised",
)
add_image("vit", "ViTForImageClassification", IMAGE, "transformer", "vanishing")
add_image("deit", "DeiTForImageClassification", IMAGE, "transformer", "vanishing")
add_image(
    "swin",
    "SwinForImageClassification",
    {"image_size": 8, "patch_size": 2, "num_channels": 2, "embed_dim": 4, "depths": [2, 1], "num_heads": [1, 2]}
    | {"window_size": 2, "num_labels": 3},
    "transformer",
    "vanishing",
    "conv",
)
RESNET = {"num_channels": 2, "embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "num_labels": 3}
add_image("resnet in evaluation", "ResNetForImageClassification", RESNET | {"layer_type": "basic"}, "conv", "norm")
add_image(
    "resnet in training",
    "ResNetForImageClassification",
    RESNET | {"layer_type": "bottleneck"},
    "conv",
    "norm",
    "vanishing",
    train=True,
    independent=False,
)
add_image(
    "convnext",
    "ConvNextForImageClassification",
    {"num_channels": 2, "patch_size": 2, "num_stages": 2, "hidden_sizes": [4, 6], "depths": [1, 1], "num_labels": 3},
    "conv",
)
add_image(
    "regnet",
    "RegNetForImageClassification",
    {"num_channels": 2, "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "groups_width": 2}
    | {"num_labels": 3},
    "conv",
    "norm",
)
CLIP = SMALL | {"projection_dim": 4}
add(
    "clip",
    (3, 8, 8),
    "CLIPModel",
    image_and_text,
    {
        "projection_dim": 4,
        "text_config": CLIP | TEXT | {"max_position_embeddings": 6},
        "vision_config": CLIP | {"image_size": 8, "patch_size": 4},
    },
    "transformer",
    "vanishing",
    losses=image_and_text_losses,
    independent=False,
)
