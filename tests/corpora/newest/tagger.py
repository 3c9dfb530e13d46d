"""A tagger: a packed two-way LSTM and logarithms of sums beside cells by hand and scaled products."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.corpora.unseen.weights import Functional, shaken

WORDS, WIDTH, HIDDEN, TAGS, LAYERS = 30, 16, 12, 5, 2


class CRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.start_transitions = nn.Parameter(torch.randn(TAGS))
        self.end_transitions = nn.Parameter(torch.randn(TAGS))
        self.transitions = nn.Parameter(torch.randn(TAGS, TAGS))

    def forward(self, emissions, tags, mask):
        return self.score(emissions, tags, mask) - self.normalizer(emissions, mask)

    def score(self, emissions, tags, mask):
        rows = torch.arange(tags.shape[1])
        score = self.start_transitions[tags[0]] + emissions[0, rows, tags[0]]
        for i in range(1, len(tags)):
            step = self.transitions[tags[i - 1], tags[i]] + emissions[i, rows, tags[i]]
            score = score + step * mask[i]
        last_tags = tags[mask.long().sum(dim=0) - 1, rows]
        return score + self.end_transitions[last_tags]

    def normalizer(self, emissions, mask):
        score = self.start_transitions + emissions[0]
        for i in range(1, len(emissions)):
            next_score = score.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            next_score = torch.logsumexp(next_score, dim=1)
            score = torch.where(mask[i].unsqueeze(1), next_score, score)
        return torch.logsumexp(score + self.end_transitions, dim=1)

    def decode(self, emissions, mask):
        score, history = self.start_transitions + emissions[0], []
        for i in range(1, len(emissions)):
            next_score = score.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            next_score, indices = next_score.max(dim=1)
            score = torch.where(mask[i].unsqueeze(1), next_score, score)
            history.append(indices)
        best, paths = (score + self.end_transitions).max(dim=1), []
        for row, size in enumerate(mask.long().sum(dim=0)):
            path = [best.indices[row]]
            for indices in reversed(history[: size - 1]):
                path.append(indices[row][path[-1]])
            paths += reversed(path)
        return best.values, torch.stack(paths)


class BiLSTMCRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.crf = nn.Embedding(WORDS, WIDTH), CRF()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, num_layers=LAYERS, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * HIDDEN, TAGS)

    def forward(self, words, tags, mask):
        packed = pack_padded_sequence(self.embedding(words), mask.sum(0), enforce_sorted=False)
        emissions = 3 * self.hidden2tag(pad_packed_sequence(self.lstm(packed)[0])[0])
        return self.crf(emissions, tags, mask), *self.crf.decode(emissions, mask)


class HandTagger(Functional):
    def layer(self, x, turned, i):
        both = torch.stack([x, x.gather(1, turned.expand_as(x))])
        names = f"l{i}", f"l{i}_reverse"
        into = torch.stack([self.w("lstm_weight_ih", name).T for name in names])
        back = torch.stack([self.w("lstm_weight_hh", name).T for name in names])
        biases = [self.w("lstm_bias_ih", name) + self.w("lstm_bias_hh", name) for name in names]
        gates = torch.einsum("dnti,dig->tdng", both, into) + torch.stack(biases)[:, None]
        state = cell = x.new_zeros(2, len(x), HIDDEN)
        states = []
        for gate in gates:
            enter, forget, new, leave = torch.baddbmm(gate, state, back).split(HIDDEN, -1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
            states.append(state)
        onward, reverse = torch.stack(states, 2)
        return torch.cat([onward, reverse.gather(1, turned.expand_as(reverse))], -1)

    def likelihood(self, scores, tags, real):
        marks = F.one_hot(tags, TAGS) * real[..., None].float()
        pairs = torch.einsum("nti,ntj->nij", marks[:, :-1], marks[:, 1:])
        good = (scores * marks).sum((1, 2)) + (pairs * self.w("crf.transitions")).sum((1, 2))
        last = marks - F.pad(marks[:, 1:].sum(2), (0, 1))[..., None] * marks
        good = good + marks[:, 0] @ self.w("crf.start_transitions")
        good = good + last.sum(1) @ self.w("crf.end_transitions")
        share, total = (self.w("crf.start_transitions") + scores[:, 0]).exp(), 0
        for t in range(1, tags.shape[1]):
            moved = share @ self.w("crf.transitions").exp() * scores[:, t].exp()
            share = torch.where(real[:, t, None], moved, share)
            size = share.sum(1, keepdim=True)
            share, total = share / size, total + size[:, 0].log()
        return good - total - (share @ self.w("crf.end_transitions").exp()).log()

    def best(self, scores, real):
        moves, values = self.w("crf.transitions"), [self.w("crf.end_transitions").expand(3, -1)]
        for t in range(scores.shape[1] - 1, 0, -1):
            ahead = (moves + (scores[:, t] + values[0])[:, None]).amax(2)
            values.insert(0, torch.where(real[:, t, None], ahead, values[0]))
        total, tag = (self.w("crf.start_transitions") + scores[:, 0] + values[0]).max(1)
        path = [tag]
        for t in range(1, scores.shape[1]):
            path.append((moves[path[-1]] + scores[:, t] + values[t]).argmax(1))
        return total, torch.stack(path, 1)[real]

    def forward(self, words, tags, sizes):
        places = torch.arange(words.shape[1])
        real = places < sizes[:, None]
        turned = torch.where(real, sizes[:, None] - 1 - places, places)[..., None]
        x = F.embedding(words, self.w("embedding.weight"))
        for i in range(LAYERS):
            x = self.layer(x, turned, i)
        scores = 3 * F.linear(x, self.w("hidden2tag.weight"), self.w("hidden2tag.bias"))
        return self.likelihood(scores, tags, real), *self.best(scores, real)


def build():
    reference, sizes = shaken(BiLSTMCRF()), torch.tensor([6, 9, 4])
    port, mask = HandTagger(reference), torch.arange(9) < sizes[:, None]
    words, tags = (torch.randint(1, size, mask.shape) * mask for size in (WORDS, TAGS))
    return lambda: reference(words.T, tags.T, mask.T), lambda: port(words, tags, sizes)
