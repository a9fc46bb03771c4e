"use strict";

/** An answer that comes in less was read in one piece, and says nothing of the server's speed. */
const SHORTEST_RATED_SECONDS = 0.05;

/** Times and counts of one request, while its answer comes and afterwards. */
class Progress {
  constructor() {
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.pieces = 0;
    this.usage = null;
    this.finish = null;
    /** Whether the answer began in an earlier life of the page, or of the connection: its times say nothing. */
    this.isResumed = false;
  }

  piece() {
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.pieces += 1;
  }

  /** Figures; null stands for what is not known. `before` are those of the part that the answer goes on from. */
  stats(before = null) {
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const isRated = !this.isResumed && tokens > 1 && seconds > SHORTEST_RATED_SECONDS;
    const firstSeconds = this.isResumed || this.firstAt === null ? null : (this.firstAt - this.startedAt) / 1000;
    return {
      tokens: tokens + (before?.tokens ?? 0),
      promptTokens: before?.promptTokens ?? this.usage?.prompt_tokens ?? null,
      cachedTokens: before?.cachedTokens ?? this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
      firstTokenSeconds: before?.firstTokenSeconds ?? firstSeconds,
      tokensPerSecond: isRated ? (tokens - 1) / seconds : null,
      finish: this.finish,
    };
  }
}
