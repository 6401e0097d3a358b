#include "llama_cpp/compressor.hpp"

namespace kvfold::llama {

template class compressor<evaluate::any_policy>;

}  // namespace kvfold::llama
