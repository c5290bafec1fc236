// Why a prompt did not resume deeper, in words for people.

export const FULL = "all but the last page was cached";

export const REASONS = {
  diverged: "the prompt leaves what is cached",
  cold: "nothing begins like it",
  other_namespace: "its namespace holds nothing",
  no_checkpoint: "KV is there, a state is not",
  evicted: "given up for memory",
  no_memory: "no room to hold the match",
  too_short: "less than a page",
  cache_off: "the cache is off",
  prompt_logprobs: "all of it was asked for",
};
