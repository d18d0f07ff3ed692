"""Keys of a config.json that do not affect a MoE layer.

Most are fields of transformers' config classes for the model types in ``checkpoint.config``; the others occur in the
published files of these models.
"""

from __future__ import annotations

#: Keys unrelated to the MoE layer: files and text, generation, attention, positions, dense layers, losses, and which
#: layers have experts, in which format (the tensors and ModelSlim's description show both).
HARMLESS = frozenset(
    """
    architectures auto_map chunk_size_feed_forward dtype id2label is_decoder is_encoder_decoder label2id
    output_attentions output_hidden_states problem_type return_dict task_specific_params torch_dtype
    transformers_version use_bfloat16 use_cache bos_token_id eos_token_id pad_token_id sep_token_id tie_word_embeddings
    tokenizer_class torchscript vocab_size initializer_range num_hidden_layers unsloth_version quantization_config
    compression_config expert_dtype for_llm_compressor quantize moe_quantize mla_quantize mtp_quantize

    add_cross_attention bad_words_ids begin_suppress_tokens cache_implementation cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix pruned_heads
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature tf_legacy_loss
    tie_encoder_decoder top_k top_p typical_p

    attn_scale attn_temperature_tuning floor_scale no_rope_layer_interval no_rope_layers o_groups o_lora_rank
    compress_rates compress_ratios compress_rope_theta hc_eps hc_mult hc_sinkhorn_iters layer_group_size
    short_conv_kernel_size linear_head_dim linear_num_heads kda_lower_bound kda_safe_gate chunk_size conv_kernel expand
    mamba_head_dim mamba_hidden_act mamba_num_heads mamba_proj_bias mamba_ssm_cache_dtype n_groups ssm_state_size
    time_step_floor time_step_limit time_step_max time_step_min use_conv_bias use_mamba_kernels attention_bias
    attention_chunk_size attention_dropout attention_value_scale attn_implementation attn_logit_softcapping
    attn_module_list_cfg attn_output_gate attn_type_list add_full_attention_sink_bias add_swa_attention_sink_bias
    block_size clip_qkv full_attention_interval full_attn_alpha_factor full_attn_beta_factor head_dim
    hybrid_layer_pattern hybrid_block_size index_head_dim index_n_heads index_topk index_share_for_mtp_iteration
    index_skip_topk_offset index_topk_freq index_topk_pattern indexer_rope_interleave indexer_types kv_lora_rank
    layer_types layernorm_full_attention_alpha layernorm_full_attention_beta layernorm_linear_attention_alpha
    layernorm_linear_attention_beta linear_attn_alpha_factor linear_attn_beta_factor linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype
    max_window_layers num_attention_heads num_key_value_heads num_swa_attention_heads q_lora_rank qk_head_dim
    qk_nope_head_dim qk_norm_type qk_rope_head_dim qkv_bias sliding_window sliding_window_size swa_attention_sink_bias
    swa_head_dim swa_num_attention_heads swa_num_key_value_heads swa_rope_theta swa_v_head_dim use_qk_norm
    use_sliding_window v_head_dim attention_method mla_scale_kv_lora mla_scale_q_lora
    gated_attention_proj_granularity_type group_norm_size no_kda_lora attention_head_dim cla_share_factor use_cla
    use_mla

    max_model_len max_position_embeddings original_max_position_embeddings partial_rotary_factor rope_interleave
    rope_parameters rope_scaling rope_theta rotary_dim position_embedding_xdrope use_rotary_pos_emb

    attention_multiplier embedding_multiplier logits_scaling residual_multiplier residual_in_fp32
    rescale_prenorm_residual layer_norm_epsilon attn_norm_eps hidden_dropout layernorm_epsilon layernorm_mlp_alpha
    layernorm_mlp_beta mlp_alpha_factor mlp_beta_factor postnorm rms_norm_eps norm_eps norm_type

    interleave_moe_layer_step intermediate_size_mlp moe_layers layers_block_type hybrid_override_pattern
    moe_layer_end_index moe_layer_interval moe_layer_start_index num_hash_layers moe_layer_num_skipped
    decoder_sparse_step first_k_dense_replace intermediate_size mlp_intermediate_size mlp_layer_types mlp_only_layers
    moe_layer_freq dense_intermediate_size ffn_hidden_size num_layers

    initial_context_length moe_router_dtype router_dtype use_rmsnorm use_qkv_bias embedding_dropout output_dropout
    norm_head eod_token_id eod_id lm_head_bias num_logits_to_keep moe_capacity moe_shared_expert_overlap
    mtp_layers_block_type mtp_loss_scaling_factor model_max_length aux_loss_alpha ep_size mtp_transformer_layers
    num_mtp_layers num_mtp_modules num_nextn_predict_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings
    output_router_logits pretraining_tp router_aux_loss_coef seq_aux use_mtp add_classification_head class_num
    dense_list im_end_id im_newline_id im_start_id image_token_id mask_init_id num_media_embeds org_vocab_size pad_id
    pool_type skip_cls_token text_end_id text_start_id unused_token_id_start video_end_id video_start_id
    vit_add_patchemb_bias
    """.split()  # noqa: SIM905
)

#: Keys that change the layers of other models, with the value that has no effect.
NEUTRAL: dict[str, object] = {
    "input_jitter_noise": 0,
    "mlp_bias": False,
    "moe_latent_size": 0,
    "moe_num_shared_experts": 0,
    "n_group": 1,
    "n_shared_experts": 0,
    "norm_topk_prob": True,
    "num_zero_experts": 0,
    "routed_scaling_factor": 1,
    "router_jitter_noise": 0,
    "router_scaling_factor": 1,
    "shared_expert_intermediate_size": 0,
    "shared_intermediate_size": 0,
    "swiglu_limit": 0,
    "use_bias": False,
    "topk_group": 1,
    "zero_expert_num": 0,
}
