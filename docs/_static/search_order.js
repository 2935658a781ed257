// Sphinx's weights of a search, with programs and answers before pages for developers where the words are found in both.
const FIRST = ["tasks/", "faq", "quickstart", "checkpoints", "many-devices", "troubleshooting"];
const LAST = ["architecture", "contributing", "benchmarks", "checkpoint-format", "own-strategies", "bagua"];
const begins = (page, names) => names.some((name) => page.startsWith(name));

var Scorer = {
    score: ([page, title, anchor, description, score]) => score + (begins(page, FIRST) ? 3 : begins(page, LAST) ? -3 : 0),
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
};
