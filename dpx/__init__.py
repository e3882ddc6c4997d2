"""dpx: train and publish models on private records, in JAX, with a guarantee that you can show.

I have                                   I want                          use
features and labels, or any JAX loss     a trained model                 dpx.training.fit
a budget, and no idea how to train       batches, steps and sampling     dpx.training.plan, dpx plan
a text, of one or several authors        a model that writes such text   dpx run --config=text, dpx.ngram
a pretrained language model              to tune it                      dpx run --config=finetune
a table of user, item and time           recommendations                 dpx.recommend
keys and values                          to answer any number of queries  dpx.cross_attention.build
a matrix whose columns are records       X Xᵀ, or attention from it      dpx.gram.release
prompts of labelled tokens               in-context regression           dpx.noisy_head.fit
a training loop of my own                its parts                       dpx.clipped_grad, dpx.privatize,
                                                                         dpx.poisson_batches
data on many machines                    one release of all of them      dpx.release
an ε, a δ                                the noise, and back             dpx.privacy
several releases                         what they cost together         dpx.Ledger
a released object                        a file with its guarantee       dpx.save, dpx.load
a claim                                  to attack it                    dpx.audit

Every private result has a `guarantee`, a `dpx.PrivacyGuarantee`: it states ε, δ, which data sets are
neighbours, what a record is, and which assumptions it rests on. `dpx.secret_key()` makes the key that noise
is drawn with. On a command line, `dpx --help` lists the commands and `dpx configs` the experiments.

Importing `dpx` takes no time: each name is imported when it is used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
