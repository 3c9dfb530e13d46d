"""The faults of the third families, which were written without sight of the comparison, and legal
edits.
"""

from __future__ import annotations

from tests.corpora.unseen.programs import Edit

FAULTS = {
    "wan_rotary_rows_and_columns_exchanged": Edit(
        "places = torch.cartesian_prod(*map(torch.arange, (frames, shape[0] // 2, shape[1] // 2)))",
        """places = torch.cartesian_prod(
            *map(torch.arange, (frames, shape[0] // 2, shape[1] // 2))
        )[:, [0, 2, 1]]""",
        reference=(
            'places = torch.meshgrid(*map(torch.arange, grid), indexing="ij")',
            "angles = [p.reshape(-1, 1) * 10000 ** -(torch.arange(n) / n)",
            "angles = torch.cat(angles, dim=-1)[:, None]",
            "return torch.view_as_real(x * torch.polar(",
        ),
        at=(
            "angles = (places.repeat_interleave(torch.tensor(PAIRS), 1) * rates)",
            "cos, sin = angles.cos(), angles.sin()",
        ),
    ),
    "wan_query_and_key_norm_per_head": Edit(
        'return F.rms_norm(x, (WIDTH,), self.w(*name, "weight"), 1e-6)',
        """x = x.unflatten(-1, (HEADS, -1))
        return F.rms_norm(x, x.shape[-1:], None, 1e-6).flatten(-2) * self.w(*name, "weight")""",
        reference=(
            "q, k = self.norm_q(self.q(x)), self.norm_k(self.k(context))",
            "self.norm_q, self.norm_k = nn.RMSNorm(WIDTH, eps=1e-6)",
        ),
        at=(
            'qk = torch.stack([self.rms(q, own, "norm_q")',
            'q = self.rms(self.dense(y, cross, "q"), cross, "norm_q")',
            'k = self.rms(self.dense(text, cross, "k"), cross, "norm_k")',
        ),
    ),
    "wan_feed_forward_shift_and_scale_exchanged": Edit(
        "y = torch.addcmul(late[0], F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + late[1])",
        "y = torch.addcmul(late[1], F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + late[0])",
        reference=(
            "y = self.up(self.norm2(x) * (1 + e[4]) + e[3])",
            "e = (self.modulation + e0).chunk(6, dim=1)",
        ),
        at=('y = F.gelu(self.dense(y, name, "up"), approximate="tanh")',),
    ),
    "wan_head_modulated_by_the_activated_vector": Edit(
        'clock = self.dense(F.silu(vector), "time_proj").unflatten(1, (6, -1))',
        """vector = F.silu(vector)
        clock = self.dense(vector, "time_proj").unflatten(1, (6, -1))""",
        reference=(
            "shift, scale = (self.modulation + e.unsqueeze(1)).chunk(2, dim=1)",
            "e0 = self.time_proj(F.silu(e)).unflatten(1, (6, WIDTH))",
        ),
        at=("shift, scale = (self.modulation + vector[:, None]).split(1, 1)",),
    ),
    "wan_patches_taken_for_channels_first": Edit(
        'colours = self.dense(y, "head").unflatten(2, (4, LATENT)).mT',
        'colours = self.dense(y, "head")',
        reference=(
            "x = self.head(self.norm(x) * (1 + scale) + shift).view(",
            'return torch.einsum("bfhwpqrc->bcfphqwr", x)',
        ),
        at=(
            "colours = colours.reshape(len(t) * frames, -1, 4 * LATENT).mT",
            "return F.fold(colours, shape, 2, stride=2)",
        ),
    ),
    "clipt5_relative_positions_negated": Edit(
        "steps = torch.arange(WORDS) - torch.arange(WORDS)[:, None]",
        "steps = torch.arange(WORDS)[:, None] - torch.arange(WORDS)",
        reference=(
            "relative = torch.arange(WORDS)[None, :] - torch.arange(WORDS)[:, None]",
            "buckets = (relative > 0) * half",
            "x, bias = self.shared(ids), self.relative(buckets)",
        ),
        at=(
            "buckets = torch.bucketize(steps.abs(), EDGES, right=True)",
            "self.bias = nn.Parameter(reference.relative.weight[buckets]",
        ),
    ),
    "clipt5_padding_masks_queries_not_keys": Edit(
        "self.bias.masked_fill(~real[:, None, None], -1e9)",
        "self.bias.masked_fill(~real[:, None, :, None], -1e9)",
        reference=(
            "padding = (1.0 - mask.float())[:, None, None, :]",
            "x, bias = self.shared(ids), self.relative(buckets)",
            "weights = (q @ k.transpose(2, 3) + position_bias).softmax(dim=-1)",
        ),
        at=("mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)",),
    ),
    "clipt5_first_norm_with_epsilon_of_the_other_encoder": Edit(
        'qkv = F.linear(F.rms_norm(x, (WIDTH,), eps=1e-6), self.w(name, "qkv"))',
        'qkv = F.linear(F.rms_norm(x, (WIDTH,), eps=1e-5), self.w(name, "qkv"))',
        reference=(
            "y = self.norm_0(x)",
            "self.norm_0, self.norm_1 = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))",
        ),
    ),
    "clipt5_exact_gelu_in_place_of_the_quick": Edit(
        'x = x + self.dense(F.silu(1.702 * hidden) / 1.702, name, "c_proj")',
        'x = x + self.dense(F.gelu(hidden), name, "c_proj")',
        reference=("return x + self.c_proj(y * torch.sigmoid(1.702 * y))",),
    ),
    "clipt5_pooled_at_the_last_word_before_the_end": Edit(
        "(tokens != EOS).sum(1)]",
        "(tokens != EOS).sum(1) - 1]",
        reference=("pooled = self.projection(x[torch.arange(len(x)), clip_ids.argmax(dim=-1)])",),
    ),
    "vae2d_downsampling_padded_at_the_top_and_left": Edit(
        'x = self.windows(x, "encoder", i, pads=(0, 1), step=2)',
        'x = self.windows(x, "encoder", i, pads=(1, 0), step=2)',
        reference=("return super().forward(F.pad(x, (0, 1, 0, 1)))",),
        at=(
            "x = F.pad(x, (0, 0, *pads, *pads))",
            "return self.dense(x.unfold(1, 3, step).unfold(2, 3, step).flatten(3), *name)",
        ),
    ),
    "vae2d_groups_of_strided_channels": Edit(
        """grouped = x.unflatten(-1, (GROUPS, -1))
        variance, mean = torch.var_mean(grouped, (1, 2, 4), correction=0, keepdim=True)""",
        """grouped = x.unflatten(-1, (-1, GROUPS))
        variance, mean = torch.var_mean(grouped, (1, 2, 3), correction=0, keepdim=True)""",
        reference=(
            "h = self.conv1(F.silu(self.norm1(x)))",
            "h = self.conv2(F.silu(self.norm2(h)))",
            "h = self.norm(x)",
        ),
        at=(
            "x = ((grouped - mean) * (variance + 1e-6).rsqrt()).flatten(3)",
            'y = self.windows(F.silu(self.normed(x, *name, "norm1")), *name, "conv1")',
        ),
    ),
    "vae2d_attention_scaled_twice": Edit(
        "scores = (q * WIDE**-0.25) @ (k * WIDE**-0.25).mT",
        "scores = (q * WIDE**-0.5) @ (k * WIDE**-0.5).mT",
        reference=("weights = torch.bmm(q.transpose(1, 2), k) * WIDE**-0.5",),
        at=("y = (scores.softmax(-1) @ v).view(x.shape)",),
    ),
    "vae2d_middle_adds_the_normalized_maps": Edit(
        """q, k, v = self.dense(self.normed(x, *name, "norm"), *name, "qkv").flatten(1, 2)""",
        """x = self.normed(x, *name, "norm")
        q, k, v = self.dense(x, *name, "qkv").flatten(1, 2)""",
        reference=("return x + self.proj_out(h.view(x.shape))",),
        at=('return x + self.dense(y, *name, "proj_out")',),
    ),
    "vae2d_shift_undone_before_the_scale": Edit(
        "x = latents.permute(0, 2, 3, 1) / SCALE + SHIFT",
        "x = (latents.permute(0, 2, 3, 1) + SHIFT) / SCALE",
        reference=("z = latents / SCALE + SHIFT",),
    ),
    "gemma_window_one_too_wide": Edit(
        "blocked = (distance < 0) | (distance >= reach)",
        "blocked = (distance < 0) | (distance > reach)",
        reference=(
            'local = causal + torch.full((n, n), float("-inf")).tril(-WINDOW)',
            "causal if i % 2 else local)",
            "F.softmax(scores + mask, dim=-1)",
        ),
        at=("scores.masked_fill(blocked",),
    ),
    "gemma_masked_before_the_cap": Edit(
        "scores = SCORE_CAP * (scores / SCORE_CAP).tanh()\n"
        "        scores = scores.masked_fill(blocked[self.is_global], -torch.inf)",
        "scores = scores.masked_fill(blocked[self.is_global], -torch.inf)\n"
        "        scores = SCORE_CAP * (scores / SCORE_CAP).tanh()",
        reference=(
            "scores = torch.tanh(scores / SCORE_CAP) * SCORE_CAP",
            "F.softmax(scores + mask, dim=-1)",
        ),
        at=("scores.softmax(-1), v)",),
    ),
    "gemma_query_heads_dealt_out_in_turn": Edit(
        "queries = attn.q_proj.weight.view(KV, GROUP, DIM, WIDTH) * QUERY_SCALAR**-0.5",
        "queries = attn.q_proj.weight.view(GROUP, KV, DIM, WIDTH) * QUERY_SCALAR**-0.5\n"
        "        queries = queries.transpose(0, 1)",
        reference=(
            "projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)",
            "q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in projected)",
            "k, v = k.repeat_interleave(GROUP, dim=1), v.repeat_interleave(GROUP, dim=1)",
        ),
        at=(
            "self.qkv = torch.cat([queries, keys, values], 1)",
            "heads = (self.norm(h, 0) @ self.qkv)",
        ),
    ),
    "gemma_last_norm_over_the_residual_too": Edit(
        'return h + self.norm(F.linear(up * F.gelu(gate, approximate="tanh"), self.w_down), 3)',
        'return self.norm(h + F.linear(up * F.gelu(gate, approximate="tanh"), self.w_down), 3)',
        reference=("return x + self.norms[3](y)",),
    ),
    "gemma_head_reads_the_scaled_table": Edit(
        "logits = F.rms_norm(h, (WIDTH,), self.gain, EPS) @ self.head.T",
        "logits = F.rms_norm(h, (WIDTH,), self.gain, EPS) @ self.table.T",
        reference=("logits = F.linear(self.norm(x), self.embed_tokens.weight)",),
    ),
    "heun_second_slope_at_the_old_level": Edit(
        "ahead = self.denoise(torch.lerp(clean, x, ratio), level + 1, classes)",
        "ahead = self.denoise(torch.lerp(clean, x, ratio), level, classes)",
        reference=(
            "d_prime = (x_next - precondition(net, x_next, t_next, class_labels)) / t_next",
            "c_skip = SIGMA_DATA**2",
            "c_out = sigma * SIGMA_DATA",
            "c_in = 1 / (SIGMA_DATA**2",
            "c_noise = sigma.log() / 4",
        ),
        at=(
            "mood = self.dense(self.waves[level]",
            'y = self.convolve(self.gain_in[level] * x, "conv_in")',
            "return self.keep[level] * x + self.gain_out[level] * y",
        ),
    ),
    "heun_weights_of_both_denoised_by_the_ratio": Edit(
        "clean = clean + (ahead - clean) / (2 * ratio)",
        "clean = clean + (ahead - clean) * (ratio / 2)",
        reference=("x_next = x_cur + (t_next - t_cur) * (0.5 * d_cur + 0.5 * d_prime)",),
        at=("x = ratio * x + (1 - ratio) * clean",),
    ),
    "heun_groups_of_every_fourth_channel": Edit(
        "parts = x.unflatten(-1, (GROUPS, -1))\n"
        "        variance, mean = torch.var_mean(parts, (1, 2, 4), correction=0, keepdim=True)",
        "parts = x.unflatten(-1, (-1, GROUPS))\n"
        "        variance, mean = torch.var_mean(parts, (1, 2, 3), correction=0, keepdim=True)",
        reference=(
            "orig, x = x, self.conv0(F.silu(self.norm0(x)))",
            "x = F.silu(torch.addcmul(shift, self.norm1(x), scale + 1))",
            "return self.conv_out(F.silu(self.norm_out(x)))",
        ),
        at=("flat = ((parts - mean) * (variance + EPS).rsqrt()).flatten(-2)",),
    ),
    "heun_taps_column_by_column": Edit(
        "w.permute(2, 3, 1, 0).flatten(0, 2)",
        "w.permute(3, 2, 1, 0).flatten(0, 2)",
        reference=(
            "x = self.conv_in(x)",
            "orig, x = x, self.conv0(F.silu(self.norm0(x)))",
            "return (self.conv1(x) + orig) * math.sqrt(0.5)",
            "return self.conv_out(F.silu(self.norm_out(x)))",
        ),
        at=('return torch.cat(near, -1) @ self.taps[f"{name}.weight"]',),
    ),
    "heun_output_gain_over_the_square": Edit(
        "self.gain_out = self.levels * SIGMA_DATA / spread",
        "self.gain_out = self.levels * SIGMA_DATA / spread**2",
        reference=(
            "c_out = sigma * SIGMA_DATA / (sigma**2 + SIGMA_DATA**2).sqrt()",
            "return c_skip * x + c_out * model(c_in * x, c_noise.reshape(1), class_labels)",
        ),
        at=("return self.keep[level] * x + self.gain_out[level] * y",),
    ),
    "conformer_distances_negated": Edit(
        "away = steps[:, None] - steps + len(steps) - 1",
        "away = steps - steps[:, None] + len(steps) - 1",
        reference=(
            "position = torch.arange(x.size(1) - 1, -x.size(1), -1.0).unsqueeze(1)",
            "matrix_bd = F.pad(",
            "shifted = matrix_bd.view(",
            "shifted = shifted.reshape(",
        ),
        at=("scores = scores + far.gather(-1, away.expand_as(scores))",),
    ),
    "conformer_depthwise_bias_past_the_batch_norm": Edit(
        "offset = (layer.depthwise.bias - bn.running_mean) * gain + bn.bias",
        "offset = layer.depthwise.bias - bn.running_mean * gain + bn.bias",
        reference=(
            "y = self.depthwise(y.masked_fill(~mask[:, None], 0.0))",
            "x = x + self.pointwise2(F.silu(self.bn(y))).transpose(1, 2)",
        ),
        at=('x = torch.einsum("btck,kc->btc", windows',),
    ),
    "conformer_content_bias_of_the_positions": Edit(
        'common = torch.einsum("hd,bkhd->bhk", self.w("layers", i, "bias_u"), k)',
        'common = torch.einsum("hd,bkhd->bhk", self.w("layers", i, "bias_v"), k)',
        reference=("matrix_ac = (q + self.bias_u[:, None]) @ k.transpose(-2, -1)",),
        at=('scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + common',),
    ),
    "conformer_subsampled_map_flattened_channels_first": Edit(
        "x.permute(0, 3, 2, 1).flatten(2)",
        "x.permute(0, 3, 1, 2).flatten(2)",
        reference=("x = self.out(x.transpose(1, 2).flatten(2)) * WIDTH**0.5",),
        at=("rows = reference.out.weight.view(", "self.entry = rows.flatten(1)"),
    ),
    "conformer_padding_leaks_into_the_convolution": Edit(
        "x = value * gate.sigmoid() * valid[..., None]",
        "x = value * gate.sigmoid()",
        reference=("y = self.depthwise(y.masked_fill(~mask[:, None], 0.0))",),
    ),
}

LEGAL = {
    "wan_feed_forward_of_a_folded_scale": Edit(
        "y = torch.addcmul(late[0], F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + late[1])",
        """y = F.layer_norm(x, (WIDTH,), eps=1e-6)
            y = y + late[0] + y * late[1]""",
    ),
    "clipt5_causal_mask_by_the_library": Edit(
        """scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(CLIP // CLIP_HEADS)
            share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            mixed = torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(2)""",
        """q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            mixed = mixed.transpose(1, 2).flatten(2)""",
    ),
    "vae2d_upsampled_by_an_index": Edit(
        "x = x.repeat_interleave(2, 1).repeat_interleave(2, 2)",
        """rows, columns = (torch.arange(2 * size) // 2 for size in x.shape[1:3])
            x = x[:, rows[:, None], columns]""",
    ),
    "gemma_turned_by_real_numbers": Edit(
        "turned = torch.complex(*heads[..., : GROUP + 1, :].chunk(2, -1)) * turns\n"
        "        turned = torch.cat([turned.real, turned.imag], -1)",
        "low, high = heads[..., : GROUP + 1, :].chunk(2, -1)\n"
        "        low, high = (low * turns.real - high * turns.imag,"
        " low * turns.imag + high * turns.real)\n"
        "        turned = torch.cat([low, high], -1)",
    ),
    "heun_mean_of_two_slopes": Edit(
        "clean = clean + (ahead - clean) / (2 * ratio)\n"
        "            x = ratio * x + (1 - ratio) * clean",
        "near = torch.lerp(clean, x, ratio)\n"
        "            x = x + (ratio - 1) / 2 * ((x - clean) + (near - ahead) / ratio)",
    ),
    "conformer_shift_by_padding": Edit(
        "scores = scores + far.gather(-1, away.expand_as(scores))",
        "far = F.pad(far.flip(-1), (1, 0)).flatten(2)\n"
        "        far = far.unflatten(2, (-1, len(away)))[:, :, 1:].flatten(2)\n"
        "        scores = scores + far.unflatten(2, (len(away), -1))[..., : len(away)]",
    ),
}
