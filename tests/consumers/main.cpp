// The second file that includes the headers: what is not inline would be there twice.
#include <cstdio>
#include <stdexcept>

#include "engine.hpp"

int main() {
  try {
    kvfold::cache<float> none{{.heads = 0, .dim = 8, .capacity = 17}};
  } catch (const std::invalid_argument& refused) {
    std::printf("kvfold %d.%d.%d: %.9g; %s\n", KVFOLD_VERSION_MAJOR, KVFOLD_VERSION_MINOR,
                KVFOLD_VERSION_PATCH, decode(100), refused.what());
    return 0;
  }
  return 1;
}
